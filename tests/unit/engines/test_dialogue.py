"""Dialogues as tokens: what is drawn with a tool's answers in between reads the same when it is judged."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engines import Engine, GenerationRequest, build
from shoal.engines.dialogue import Dialogue, Line, Reading, Talks, dialogue_for, greedy_answers
from shoal.environments import EnvironmentSettings, has_dialogues
from shoal.environments import build as build_environment
from shoal.errors import ConfigError, ProtocolError
from shoal.models import TextTokenizer, model_folder, read_files
from shoal.models.ending import Characters, EndRule
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.protocol import DialogueTerms, Lease, PolicyRef, SamplingParameters, drawn_mask, pack_spans, unpack_spans

EOS = 1
TINY = read_files(model_folder("tiny"))


def moody(turns: Sequence[str]) -> str | None:
    """Silent, short or long, with end tokens in it: by the length of the last turn."""
    last = len(turns[-1])
    return None if last % 4 == 3 else "".join(map(chr, [*range(last), EOS][: last % 4 * 3]))


def dialogue(max_turns: int = 4, limit: int = 24, frame: tuple[int, ...] = (7,), tool: Any = moody) -> Dialogue:
    terms = DialogueTerms(tool="moody", max_turns=max_turns, before=frame, after=frame[::-1])
    return Dialogue(terms, EndRule((EOS,)), limit, tool, Characters())


def drawn(talk: Dialogue, dice: Sequence[int]) -> Line:
    """A completion of these tokens, as far as they are asked for."""
    line, source = Line(talk.respond, EndRule((EOS,)), talk.max_new_tokens), iter(dice)
    while line.take(line.forced if line.forced is not None else next(source)):
        pass
    return line


tokens = st.integers(0, 9)
frames = st.lists(st.integers(0, 9), max_size=3).map(tuple)
talks = st.builds(dialogue, st.integers(1, 6), st.integers(1, 40), frames)
dice = st.lists(tokens, min_size=40, max_size=40)


@given(talks, dice, st.integers(1, 40))
def test_drawn_dialogue_is_read_the_same_and_so_is_its_beginning(talk: Dialogue, dice: list[int], length: int) -> None:
    line = drawn(talk, dice)
    begun = talk.read(line.tokens[:length], whole=False)
    assert begun.problem == ""
    assert begun.given == tuple((start, min(count, length - start)) for start, count in line.given if start < length)
    reading = talk.read(line.tokens)
    assert (reading.given, reading.finish, reading.problem) == (tuple(line.given), line.finish, "")
    assert len(line.tokens) <= talk.max_new_tokens
    mask = drawn_mask(pack_spans(line.given), len(line.tokens))
    own = [token for token, is_own in zip(line.tokens, mask, strict=True) if is_own]
    assert own == dice[: len(own)], "every drawn token is the next of the dice"
    assert mask[0]
    assert mask[-1], "the model has the first word and the last"
    assert own.count(EOS) <= talk.terms.max_turns


@given(talks, dice, st.integers(0, 39), tokens)
def test_another_token_is_another_dialogue_or_none(talk: Dialogue, dice: list[int], at: int, other: int) -> None:
    """Whatever is changed, the claim (spans and ending) of the original holds only if the change was the model's."""
    line = drawn(talk, dice)
    if at >= len(line.tokens) or line.tokens[at] == other:
        return
    changed = [*line.tokens[:at], other, *line.tokens[at + 1 :]]
    reading = talk.read(changed)
    was_given = any(start <= at < start + length for start, length in line.given)
    if was_given:
        assert (reading.given, reading.finish, reading.problem) != (tuple(line.given), line.finish, "")


@given(talks, dice, st.data())
def test_a_shorter_or_longer_completion_is_never_taken_for_whole(talk: Dialogue, dice: list[int], data: Any) -> None:
    line = drawn(talk, dice)
    cut = data.draw(st.integers(1, max(1, len(line.tokens) - 1)))
    if cut < len(line.tokens):
        reading = talk.read(line.tokens[:cut])
        assert reading.finish is None or reading.problem
    if len(line.tokens) < talk.max_new_tokens:
        assert talk.read([*line.tokens, 5]).problem == "past end"


def test_the_rules_one_by_one() -> None:
    talk = dialogue(max_turns=3, limit=20, frame=(8,), tool=lambda turns: "\t" * len(turns))
    assert talk.read([5, EOS, 8, 9, 8, 6, EOS, 8, 9, 9, 8, EOS]) == Reading(((2, 3), (7, 4)), 3, "eos", "", 12)
    assert talk.read([5, EOS]) == Reading((), 1, None, "other words", 2)
    assert talk.read([5, EOS, 8, 9]) == Reading((), 1, None, "other words", 2)
    assert talk.read([5, EOS, 8, 8, 8, EOS]) == Reading((), 1, None, "other words", 2)
    assert talk.read([5, EOS, 8, 9, 8]).finish is None
    assert talk.read([5, EOS, 8, 9, 8, 6]).finish is None
    assert talk.read([5] * 20) == Reading((), 1, "length")
    assert talk.read([5] * 16 + [EOS]) == Reading((), 1, "length", "", 17), "three more would fill it up"
    assert talk.read([5] * 15 + [EOS]).problem == "other words"


def test_words_that_look_like_special_tokens_are_spelt_out() -> None:
    """Otherwise what a tool says could end its own turn, or open another role's."""
    texts = TextTokenizer(TINY)
    assert EOS in texts.encode("1<eos>2")
    assert EOS not in texts.encode_plain("1<eos>2")
    assert texts.decode_many([list(texts.encode_plain("1<eos>2"))]) == ["1<eos>2"]
    assert texts.encode_plain("12*3") == texts.encode("12*3")
    terms = DialogueTerms(tool="t", max_turns=2)
    talk = Dialogue(terms, EndRule((EOS,)), 20, lambda _turns: "<eos>", texts)
    assert talk.respond([5, EOS]) == texts.encode_plain("<eos>")
    assert talk.read([5, EOS, *texts.encode_plain("<eos>"), 6, EOS]).finish == "eos"
    assert talk.read([5, EOS, EOS, 6, EOS]).problem == "other words"


def lease(tool: str | None = "calculator") -> Lease:
    terms = None if tool is None else DialogueTerms(tool=tool, max_turns=3, before=(3,), after=(3,))
    return Lease(
        run="r", lease="l", node="n", unit=0, attempt=0, policy=PolicyRef(incarnation=0, version=0, digest="d" * 64),
        task="t", prompt_ids=(5,), seeds=("0" * 16,), environment_digest="e" * 64, issued_at_ms=0, deadline_ms=1,
        sampling=SamplingParameters(temperature=1.0, max_new_tokens=30, eos_token_ids=(EOS,)), dialogue=terms,
    )  # fmt: skip


def test_a_lease_brings_its_tool_and_its_policy_the_tokenizer() -> None:
    talk = dialogue_for(lease(), TINY)
    assert talk is not None
    texts = TextTokenizer(TINY)
    assert talk.respond([*texts.encode("12*3"), EOS]) == (3, *texts.encode("36"), 3)
    assert talk.respond([*texts.encode("seven"), EOS]) is None
    again = dialogue_for(lease(), dict(TINY))
    assert again is not None
    assert again.texts is talk.texts, "a tokenizer is loaded once"
    assert dialogue_for(lease(None), TINY) is None
    scripted = dialogue_for(lease(), {})
    assert scripted is not None
    assert scripted.respond([*map(ord, "2^5"), EOS]) == (3, *map(ord, "32"), 3)
    with pytest.raises(ConfigError, match=r"the tool 'shell\\n', which this shoal does not have \(it has calculator\)"):
        dialogue_for(lease("shell\n"), TINY)


@pytest.mark.parametrize(
    "spans", [[(0, 1)], [(2, 0)], [(2, 3), (4, 1)], [(5, 2), (2, 1)], [(2, 3), (5, 1)], [(2, 8)], [(2**32 - 1, 9)]]
)
def test_malformed_spans_are_refused(spans: list[tuple[int, int]]) -> None:
    """At the very beginning, empty, overlapping, in disorder, touching, to the very end, out of range."""
    with pytest.raises(ProtocolError, match="cannot be tool tokens"):
        unpack_spans(pack_spans(spans), 10)
    for length in (1, 4, 7, 9, 12):
        with pytest.raises(ProtocolError, match=f"{length} bytes are no pairs"):
            unpack_spans(b"\1" * length, 10)


COLD = SamplingParameters(temperature=1e-4, max_new_tokens=24, eos_token_ids=(EOS,))
PROMPTS = ("31=", "90713=", "5=", "8642=")


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(params=["torch", "scripted"])
def engine(request: pytest.FixtureRequest, tiny: LoadedModel) -> Engine:
    made = build(request.param, tiny.files)
    made.load_policy(None, policy_views(tiny.model))
    return made


@pytest.mark.parametrize("limit", [24, 9])
def test_greedy_dialogues_are_those_of_sampling_without_heat(engine: Engine, tiny: LoadedModel, limit: int) -> None:
    sampling = COLD.model_copy(update={"max_new_tokens": limit})
    prompts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    terms = DialogueTerms(tool="t", max_turns=3, before=(3,), after=(3,))
    talk = Dialogue(terms, EndRule((EOS,)), limit, lambda turns: chr(5 + len(turns)), Characters())
    talks = [talk, None, talk, talk]
    wanted = []
    for prompt, each in zip(prompts, talks, strict=True):
        respond = None if each is None else each.respond
        [[drawn]] = engine.generate([GenerationRequest(prompt, (7,), sampling, respond=respond)])
        ids = drawn.token_ids.tolist()[sum(drawn.given[-1]) if drawn.given else 0 :]
        wanted.append(ids[:-1] if ids[-1] == EOS else ids)
    assert greedy_answers(engine, prompts, talks, sampling) == wanted


def test_a_task_has_the_dialogue_that_its_lease_would_have(tiny: LoadedModel) -> None:
    calculator = build_environment(EnvironmentSettings(name="calculator", options={"max_turns": 4}))
    talks = Talks(calculator, tiny.files, COLD)
    task = calculator.tasks("held_out")[0]
    talk = talks.of(task)
    assert talk is not None
    newline = tiny.tokenizer.encode("\n")
    assert talk.terms == DialogueTerms(tool="calculator", max_turns=4, before=newline, after=newline)
    assert talks.of(task.id) == talk
    assert talk.respond([*tiny.tokenizer.encode("2*3"), EOS]) == (*newline, *tiny.tokenizer.encode("6"), *newline)
    sort = build_environment(EnvironmentSettings())
    assert Talks(sort, tiny.files, COLD).of("sort/held_out/0") is None


def test_only_dialogue_parts_of_a_mixture_answer(tiny: LoadedModel) -> None:
    mixed = build_environment(EnvironmentSettings(mix=({"name": "sort"}, {"name": "calculator"})))
    talks = Talks(mixed, tiny.files, COLD)
    held_out = mixed.tasks("held_out")
    kinds = {task.id.partition(":")[0]: talks.of(task) for task in (held_out[index] for index in range(8))}
    assert kinds["sort"] is None
    assert kinds["calculator"] is not None
    silent = build_environment(EnvironmentSettings(mix=({"name": "sort"}, {"name": "addition"})))
    assert Talks(silent, tiny.files, COLD).of(silent.tasks("train")[0]) is None
    assert (has_dialogues(mixed), has_dialogues(silent)) == (True, False)
