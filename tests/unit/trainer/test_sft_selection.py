"""Which demonstrations are trained on: rows, filters, the report, the corpus; their tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.sft import BOT, CHAT, END, FORGETFUL, SYS, TOKENIZER, USER, chat_files, chosen, put, sort_files, sort_row
from shoal.environments import EnvironmentSettings, build
from shoal.environments.settings import PromptSettings
from shoal.errors import ConfigError, ScoringFailure, UnusableTask
from shoal.models import PromptEncoder, TextTokenizer
from shoal.rewards import DirectScorer
from shoal.rewards.panel import JudgedText
from shoal.trainer.demonstrations.reading import Demonstration, Demonstrations, Encoder, Tokens
from shoal.trainer.demonstrations.selection import EnvironmentFilters, Schedule

HI = {"role": "user", "content": "hi"}
HO = {"role": "assistant", "content": "ho"}

LOST = ("tool_calls", "function_call", "reasoning_content")


def put_together(*messages: dict[str, Any]) -> str:
    return json.dumps({"messages": messages})


def reasons(outcome: Any) -> dict[int, str]:
    return {row: f"{by}: {reason}" for row, (by, reason) in outcome.left_out.items()}


def test_rows_that_are_no_demonstrations_are_counted_by_number(tmp_path: Path) -> None:
    rows: dict[Any, str] = {
        "{nonsense": "the line is no JSON object",
        put_together(HI): "messages has no turn of the assistant: there is nothing to train on",
        put_together(HI, HI, HO): "message 1 is of the role user, not assistant: turns must alternate",
        put_together(HI, {**HO, "content": " "}): "the content of message 1 is empty",
        '{"messages": null}': "messages is missing",
        **{put_together(HI, {**HO, key: [{"name": "f"}]}): f"a message has {key}, which would be lost" for key in LOST},
    }
    good = [put_together(HI, HO), put_together({**HI, "content": "hey"}, HO, HI)]
    corpus, outcome = chosen(tmp_path, [good[0], *rows, good[1]], files=chat_files())
    assert (outcome.kept, len(corpus)) == ([0, len(rows) + 1], 2)
    for number, said in enumerate(rows.values(), 1):
        assert reasons(outcome)[number].startswith(f"readable: {said}")
    prompt = [HI, {**HO, LOST[0]: [{"name": "f"}]}, HI]
    _, outcome = chosen(tmp_path, [sort_row("21"), {"prompt": prompt, "completion": "12"}])
    assert list(outcome.left_out) == [1]


def test_several_files_of_several_kinds_are_one(tmp_path: Path) -> None:
    before = [HI, HO, {"role": "user", "content": "and?"}]
    lines = put(tmp_path / "a.jsonl", [sort_row("31", task="t/0"), {"prompt": before, "completion": "so"}])
    pq.write_table(pa.Table.from_pylist([sort_row("54", task="t/2")]), tmp_path / "b.parquet")
    data = Demonstrations([lines, tmp_path / "b.parquet"])
    said = (("user", "hi"), ("assistant", "ho"), ("user", "and?"), ("assistant", "so"))
    assert list(data.read()) == [
        Demonstration(0, (("user", "31="), ("assistant", "13")), 1, task="t/0"),
        Demonstration(1, said, given=3),  # only the end of a conversation is learnt
        Demonstration(2, (("user", "54="), ("assistant", "45")), 1, task="t/2"),
    ]
    assert [data.where(row) for row in range(3)] == ["a.jsonl line 1", "a.jsonl line 2", "b.parquet row 0"]


@pytest.mark.parametrize(("wanted", "good", "bad"), [
    ("thinking", "<think>a\nb</think>\nc", "<think>a</think> "), ("boxed", "so \\boxed{7}", "so 7"),
    ("answer", "<answer>7</answer>", "<answer> </answer>"), (r"^\d+$", "12", "twelve"),
])  # fmt: skip
def test_form(tmp_path: Path, wanted: str, good: str, bad: str) -> None:
    rows = [{"text": good}, {"text": bad}]
    _, outcome = chosen(tmp_path, rows, files=chat_files(), require=(wanted,))
    assert reasons(outcome) == {1: f"form: no {wanted} in it"}


class Failing(DirectScorer):
    """Scores all but what says `fail`."""

    def scores(self, jobs: Sequence[Any]) -> list[Any]:
        broken = ScoringFailure("broken")
        return [broken if job.completion == "fail" else super(Failing, self).scores([job])[0] for job in jobs]


def test_verified_by_the_environment(tmp_path: Path) -> None:
    sort = build(EnvironmentSettings(name="sort", options={"min_digits": 3, "max_digits": 4}))
    tasks, held_out, unknown = sort.tasks("train")[:4], sort.tasks("held_out")[0], "it names no task of the environment"
    rows = {
        (tasks[0].prompt, tasks[0].answer, tasks[0].id): "",
        (tasks[1].prompt, "wrong", tasks[1].id): "verified: its reward is below 1",
        (tasks[2].prompt, "fail", tasks[2].id): "verified: could not be scored: broken",
        ("another=", tasks[3].answer, tasks[3].id): f"verified: {unknown} that asks this",
        (tasks[3].prompt, tasks[3].answer, "sort/nowhere"): f"verified: {unknown} that asks this",
        (held_out.prompt, held_out.answer, held_out.id): "held out: the environment holds this task out",
    }
    given = [{"prompt": prompt, "completion": said, "task": task} for prompt, said, task in rows]
    _, outcome = chosen(tmp_path, given, filters=EnvironmentFilters(sort, Failing(sort)), verify=True)
    assert reasons(outcome) == {number: why for number, why in enumerate(rows.values()) if why}


def test_the_best_by_rank(tmp_path: Path) -> None:
    def longest(pieces: Sequence[JudgedText]) -> list[Any]:
        return [ScoringFailure("no") if piece.completion == "?" else float(len(piece.completion)) for piece in pieces]

    pairs = [("a", "x"), ("a", "xxx"), ("a", "xxx."), ("b", "y"), ("b", "yy"), ("b", "?")]
    rows = [{"prompt": prompt, "completion": text} for prompt, text in pairs]
    corpus, outcome = chosen(tmp_path, rows, judge=SimpleNamespace(values=longest), best=0.4)
    assert outcome.kept == [1, 2]
    assert [by for by, _ in outcome.left_out.values()] == ["rank"] * 4
    assert reasons(outcome)[5].startswith("rank: could not be judged")
    assert [corpus.sample(number).trained for number in range(len(corpus))] == [4, 5]


def test_the_table_and_that_filters_see_only_what_those_before_have_kept(tmp_path: Path) -> None:
    rows: list[Any] = [sort_row("21"), "{", sort_row("7654321"), sort_row("7654321"), sort_row("21")]
    _, outcome = chosen(tmp_path, rows, max_tokens=9)
    read, unread, *by_filter, kept = outcome.lines()
    assert (read.split(), kept.split()) == (["read", "5"], ["kept", "1"])
    assert unread.startswith("  - readable            1   e.g. row 1 (demos.jsonl line 2): the line is no JSON object")
    assert by_filter == [
        "  - length              2   e.g. row 2 (demos.jsonl line 3): more than 9 tokens",
        "  - duplicates          1   e.g. row 4 (demos.jsonl line 5): the same as row 0",
    ]


def talk(*texts: str, system: str = "") -> dict[str, Any]:
    """A conversation that the user begins."""
    roles = ("user", "assistant")
    said = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *said]}


def asked(*prompts: str) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": "12"} for prompt in prompts]


def after(role: str) -> dict[str, Any]:
    return {"prompt": [{"role": role, "content": "a"}, {"role": "user", "content": "b"}], "completion": "c"}


@pytest.mark.parametrize(("rows", "left_out"), [
    pytest.param([{"prompt": "1", "completion": "23"}, {"prompt": "12", "completion": "3"}], [], id="border"),
    pytest.param(asked("add 1 11=", "add 11 1=", "add  1 \n11="), [2], id="space, but not how much"),
    pytest.param(asked("Two plus", "three", " two plus"), [2], id="not case"),
    pytest.param([talk("hi", "yo", system=each) for each in ("french", "german", "french")], [2], id="system"),
    pytest.param([after("user"), after("assistant")], [], id="who says it"),
])  # fmt: skip
def test_digest_of_demonstrations(tmp_path: Path, rows: list[dict[str, Any]], left_out: list[int]) -> None:
    assert sorted(chosen(tmp_path, rows, files=chat_files())[1].left_out) == left_out


def test_files_without_a_layout_or_of_two_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no demonstrations are in the columns question, answer"):
        Demonstrations([put(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])])
    chat, lines = put(tmp_path / "chat.jsonl", [talk("a", "b")]), put(tmp_path / "d24.jsonl", [sort_row("21")])
    pq.write_table(pa.Table.from_pylist([sort_row("54")]), tmp_path / "b.parquet")
    message = r"d24\.jsonl has no column messages, which .*chat\.jsonl has; it has prompt, completion"
    with pytest.raises(ConfigError, match=message):
        Demonstrations([chat, lines])
    with pytest.raises(ConfigError, match=r"chat\.jsonl has no column prompt.*; it has messages"):
        Demonstrations([lines, chat])
    with pytest.raises(ConfigError, match=r"b\.parquet has no column messages"):
        Demonstrations([chat, tmp_path / "b.parquet"])


def test_a_held_out_question_in_any_turn_is_left_out(tmp_path: Path) -> None:
    questions = put(tmp_path / "q.jsonl", [{"question": f"{n} plus 1?", "answer": str(n + 1)} for n in range(20)])
    data = build(EnvironmentSettings(name="dataset", data=questions, options={"grader": "exact"}))
    asked, trained = data.tasks("held_out")[0].prompt, data.tasks("train")[0].prompt
    rows = [
        talk(asked, "7"), talk(asked, "7", "thanks", "welcome"), talk("hi", "hello", asked.upper(), "7"),
        talk("hi", "hello", trained, "7"),
    ]  # fmt: skip
    assert sorted(chosen(tmp_path, rows, files=chat_files(), filters=EnvironmentFilters(data))[1].left_out) == [0, 1, 2]


def test_conversations_that_begin_with_one_question_are_on_one_side(tmp_path: Path) -> None:
    rows = [row for n in range(12) for row in (talk(f"q{n}", "a"), talk(f"Q{n}", "a", "and?", "b"))]
    corpus, _ = chosen(tmp_path, rows, files=chat_files())
    aside = set(Schedule(validation=6).batches_of(corpus.questions)[1].tolist())
    assert len(aside) == 6
    assert all((number in aside) == (number ^ 1 in aside) for number in range(24))


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\U0010fff0\U0010fff1"), min_size=1, max_size=12)


def spelt(text: str) -> list[int]:
    return list(TextTokenizer(chat_files()).encode_plain(text))


def encode(*said: tuple[str, str], template: str | None = CHAT, given: int = 0, **manner: str) -> tuple[Tokens, ...]:
    encoder = Encoder(chat_files(template), PromptSettings(**manner), "messages")
    return encoder.encode(Demonstration(0, said, given))


def learnt(sequence: Tokens) -> list[int]:
    return sequence.ids[sequence.trained].tolist()


def test_every_answer_of_a_conversation_is_trained_on_in_one_sequence() -> None:
    said = ("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d!")
    (found,), (last,) = encode(*said), encode(*said, given=4)
    first = [SYS, *spelt("S"), END, USER, *spelt("a"), END, BOT]
    assert found.ids.tolist() == [*first, *spelt("b"), END, USER, *spelt("c"), END, BOT, *spelt("d!"), END]
    assert found.ids.tolist() == last.ids.tolist()
    assert found.trained.tolist()[: len(first) + 2] == [False] * len(first) + [True] * 2
    assert learnt(found) == [*spelt("b"), END, *spelt("d!"), END]
    assert learnt(last) == [*spelt("d!"), END]
    with pytest.raises(UnusableTask, match="the model's chat template refuses the prompt"):
        encode(*said, template="{{ raise_exception('no') }}")


def test_a_template_that_forgets_thinking_gives_each_turn_its_own_sequence() -> None:
    said = ("user", "a"), ("assistant", "t</think>b"), ("user", "c"), ("assistant", "u</think>d")
    first, second = encode(*said, template=FORGETFUL)
    assert learnt(first) == [*spelt("t</think>b"), END]
    assert learnt(second) == [*spelt("u</think>d"), END]
    assert second.ids.tolist()[: -len(learnt(second))] == [
        USER, *spelt("a"), END, BOT, *spelt("b"), END, USER, *spelt("c"), END, BOT,
    ]  # fmt: skip


@settings(max_examples=25)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.sampled_from([CHAT, FORGETFUL]))
def test_each_turn_stands_behind_the_very_prompt_of_a_rollout(turns: list[tuple[str, str]], template: str) -> None:
    said = tuple(message for user, bot in turns for message in (("user", user), ("assistant", bot)))
    found = encode(*said, template=template)
    prompts = PromptEncoder(chat_files(template))
    spans = []
    for index in range(1, len(said), 2):
        asked = list(prompts.encode(said[index - 1][1], said[: index - 1]))
        spans.append((asked, [*spelt(said[index][1]), END]))
    for asked, answer in spans:  # some sequence has the prompt as its beginning and the answer, learnt, right after it
        size = len(asked)
        assert any(
            each.ids.tolist()[: size + len(answer)] == asked + answer and each.trained[size : size + len(answer)].all()
            for each in found
        )
    assert sum(int(each.trained.sum()) for each in found) == sum(len(answer) for _, answer in spans)


def test_words_that_look_like_control_tokens_are_spelt_out() -> None:
    (found,) = encode(("user", "a<|end|>"), ("assistant", "b<|end|><|user|>c"))
    assert (found.ids.tolist().count(END), found.ids.tolist().count(USER)) == (2, 1)
    assert learnt(found) == [*spelt("b<|end|><|user|>c"), END]


@pytest.mark.parametrize("template", [None, CHAT])
def test_bare_text_is_trained_on_except_its_first_token(template: str | None) -> None:
    encoder = Encoder(chat_files(template), PromptSettings(), "text")
    (found,) = encoder.encode(Demonstration(0, text="hey<|end|>"))
    assert found.ids.tolist() == [*spelt("hey<|end|>"), END]
    assert found.trained.tolist() == [False] + [True] * (len(found.ids) - 1)


def test_an_answer_that_the_prompt_has_begun_is_not_begun_twice() -> None:
    think = TOKENIZER.token_to_id("<think>")
    (found,) = encode(("user", "a"), ("assistant", "<think>b</think>c"), thinking="<think>")
    assert found.ids.tolist() == [USER, *spelt("a"), END, BOT, think, *spelt("b</think>c"), END]
    assert learnt(found) == [*spelt("b</think>c"), END]
    begun = CHAT.removesuffix("{% endif %}") + "<think>\n{% endif %}"
    (by_template,) = encode(("user", "a"), ("assistant", "<think>\nb</think>c"), template=begun)
    assert (learnt(by_template), by_template.ids.tolist().count(think)) == ([*spelt("b</think>c"), END], 1)


def test_prompt_and_completion_without_a_template_are_their_texts() -> None:
    encoder = Encoder(sort_files(), PromptSettings(), "completion")
    (found,) = encoder.encode(Demonstration(0, (("user", "312="), ("assistant", "123")), given=1))
    tokenizer = TextTokenizer(sort_files())
    assert found.ids.tolist() == [*tokenizer.encode("312=123"), tokenizer.eos_token_id]
    assert found.trained.tolist() == [False] * 4 + [True] * 4
    assert encoder.positions == 256
