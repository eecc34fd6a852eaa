"""Which demonstrations are trained on: rows that cannot be read, each filter, the table, the report, the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit.sft import chat_files, chosen, put, sort_files, sort_row, sort_rows
from shoal.environments import EnvironmentSettings, build
from shoal.environments.settings import PromptSettings
from shoal.errors import ConfigError, ScoringFailure
from shoal.rewards import DirectScorer
from shoal.rewards.panel import Piece
from shoal.trainer.demonstrations.choosing import Asking, Choosing, Corpus, Interrupted
from shoal.trainer.demonstrations.reading import Demonstration, Demonstrations, Encoder

USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "ho"}


def reasons(outcome: Any) -> dict[int, str]:
    return {row: f"{by}: {reason}" for row, (by, reason) in outcome.left_out.items()}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_that_are_no_demonstrations_are_counted_by_number(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"messages": [USER, BOT]},
        "{nonsense",
        {"messages": [USER]},
        {"messages": [USER, USER, BOT]},
        {"messages": [USER, {"role": "assistant", "content": " "}]},
        {"messages": [USER, {**BOT, "reasoning_content": "so"}]},
        {"messages": None},
        {"messages": [USER, BOT, USER]},
    ]
    corpus, outcome = chosen(tmp_path, rows, files=chat_files())
    assert outcome.kept == [0, 7]
    assert len(corpus) == 2
    said = reasons(outcome)
    assert said[1].startswith("readable: the line is no JSON object")
    assert said[2] == "readable: messages has no turn of the assistant: there is nothing to train on"
    assert said[3] == "readable: message 1 is of the role user, not assistant: turns must alternate"
    assert said[4] == "readable: the content of message 1 is empty"
    assert "reasoning_content, which would be lost" in said[5]
    assert said[6] == "readable: messages is missing"


def test_several_files_of_several_kinds_are_one(tmp_path: Path) -> None:
    lines = put(tmp_path / "a.jsonl", [sort_row("31", task="t/0"), sort_row("21")])
    pq.write_table(pa.Table.from_pylist([sort_row("54", task="t/2")]), tmp_path / "b.parquet")
    data = Demonstrations([lines, tmp_path / "b.parquet"])
    found = list(data.read())
    assert [each.row for each in found if isinstance(each, Demonstration)] == [0, 1, 2]
    assert [each.task for each in found if isinstance(each, Demonstration)] == ["t/0", "", "t/2"]
    assert [data.where(row) for row in range(3)] == ["a.jsonl line 1", "a.jsonl line 2", "b.parquet row 0"]
    assert [row["completion"] for row in data.originals([0, 2])] == ["13", "45"]


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no demonstrations are in the columns question, answer"):
        Demonstrations([put(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])])


def test_a_prompt_may_be_a_conversation_of_which_only_the_end_is_learnt(tmp_path: Path) -> None:
    before = [USER, BOT, {"role": "user", "content": "and?"}]
    found = next(Demonstrations([put(tmp_path / "a.jsonl", [{"prompt": before, "completion": "so"}])]).read())
    assert found == Demonstration(
        0, (("user", "hi"), ("assistant", "ho"), ("user", "and?"), ("assistant", "so")), given=3
    )


# ── filters ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_length(tmp_path: Path) -> None:
    rows = [sort_row("21"), sort_row("321"), sort_row("7654321")]  # 6, 8 and 16 tokens
    _, outcome = chosen(tmp_path, rows, min_tokens=7, max_tokens=9)
    assert reasons(outcome) == {0: "length: less than 7 tokens", 2: "length: more than 9 tokens"}


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ("thinking", "<think>a\nb</think>\nc", "<think>a</think> "),
        ("boxed", "so \\boxed{7}", "so 7"),
        ("answer", "<answer>7</answer>", "<answer> </answer>"),
        (r"^\d+$", "12", "twelve"),
    ],
)
def test_form(tmp_path: Path, wanted: str, good: str, bad: str) -> None:
    rows = [{"text": good}, {"text": bad}]
    _, outcome = chosen(tmp_path, rows, files=chat_files(), require=(wanted,))
    assert reasons(outcome) == {1: f"form: no {wanted} in it"}


def test_characters_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    rows = [{"text": "plain"}, {"text": "naïve"}]
    _, outcome = chosen(tmp_path, rows)
    assert reasons(outcome) == {1: "characters: characters that the tokenizer does not know"}


def test_duplicates_but_for_space_and_case(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Two  plus two?"}, {"role": "assistant", "content": "Four."}]},
        {"messages": [USER, BOT]},
        {"messages": [{"role": "user", "content": " two plus\nTWO?"}, {"role": "assistant", "content": "four."}]},
        {"messages": [USER, {**BOT, "content": "he"}]},
    ]
    _, outcome = chosen(tmp_path, rows, duplicates=True, files=chat_files())
    assert reasons(outcome) == {2: "duplicates: the same as row 0"}


def test_held_out_tasks_of_a_generator_and_of_a_data_set(tmp_path: Path) -> None:
    sort = build(EnvironmentSettings(name="sort"))
    held_out, train = sort.tasks("held_out")[0], sort.tasks("train")[0]
    rows = [{"prompt": task.prompt, "completion": task.answer} for task in (train, held_out)]
    _, outcome = chosen(tmp_path, rows, asking=Asking(sort))
    assert reasons(outcome) == {1: "held out: the environment holds this task out"}
    questions = put(
        tmp_path / "q.jsonl", [{"question": f"{number} plus 1?", "answer": str(number + 1)} for number in range(20)]
    )
    data = build(EnvironmentSettings(name="dataset", data=questions, options={"grader": "exact"}))
    asked = data.tasks("held_out")[0].prompt
    rows = [{"prompt": asked.upper(), "completion": "1"}, {"prompt": data.tasks("train")[0].prompt, "completion": "1"}]
    _, outcome = chosen(tmp_path, rows, asking=Asking(data))
    assert list(outcome.left_out) == [0]


class Failing(DirectScorer):
    """Scores all but what says `fail`."""

    def scores(self, jobs: Sequence[Any]) -> list[Any]:
        found = super().scores(jobs)
        return [
            ScoringFailure("broken") if job.completion == "fail" else each
            for job, each in zip(jobs, found, strict=True)
        ]


def test_verified_by_the_environment(tmp_path: Path) -> None:
    sort = build(EnvironmentSettings(name="sort", options={"min_digits": 3, "max_digits": 4}))
    tasks = [sort.tasks("train")[index] for index in range(4)]
    rows = [
        {"prompt": tasks[0].prompt, "completion": tasks[0].answer, "task": tasks[0].id},
        {"prompt": tasks[1].prompt, "completion": "wrong", "task": tasks[1].id},
        {"prompt": tasks[2].prompt, "completion": "fail", "task": tasks[2].id},
        {"prompt": "another=", "completion": tasks[3].answer, "task": tasks[3].id},
        {"prompt": tasks[3].prompt, "completion": tasks[3].answer, "task": "sort/nowhere"},
    ]
    _, outcome = chosen(tmp_path, rows, asking=Asking(sort, Failing(sort), has_tasks=True), verify=True)
    assert reasons(outcome) == {
        1: "verified: its reward is below 1",
        2: "verified: could not be scored: broken",
        3: "verified: no task of the environment asks this",
        4: "verified: no task of the environment asks this",
    }


def test_verified_by_the_question_where_no_task_is_named(tmp_path: Path) -> None:
    questions = put(
        tmp_path / "q.jsonl", [{"question": f"{number}+1", "answer": str(number + 1)} for number in range(20)]
    )
    data = build(EnvironmentSettings(name="dataset", data=questions, options={"grader": "exact"}))
    task = data.tasks("train")[3]
    rows = [{"prompt": task.prompt, "completion": task.answer}, {"prompt": "who knows", "completion": "x"}]
    _, outcome = chosen(tmp_path, rows, asking=Asking(data, DirectScorer(data)), verify=True)
    assert reasons(outcome) == {1: "verified: no task of the environment asks this"}
    many = build(EnvironmentSettings(name="sort", train_size=2_000_000))
    with pytest.raises(ConfigError, match="name them in a column task"):
        chosen(tmp_path, rows, asking=Asking(many, DirectScorer(many)), verify=True)


class Longest:
    """A judge that likes what is long."""

    def prepare(self) -> None: ...

    def close(self) -> None: ...

    def values(self, pieces: Sequence[Piece]) -> list[float | ScoringFailure]:
        return [ScoringFailure("no") if piece.completion == "?" else float(len(piece.completion)) for piece in pieces]


def test_the_best_by_rank(tmp_path: Path) -> None:
    rows = [
        {"prompt": prompt, "completion": text}
        for prompt, text in [("a", "x"), ("a", "xxx"), ("a", "xxx."), ("b", "y"), ("b", "yy"), ("b", "?")]
    ]
    corpus, outcome = chosen(tmp_path, rows, judge=Longest(), best_per_prompt=1)
    assert outcome.kept == [2, 4]
    assert outcome.counts["rank"] == 4
    assert reasons(outcome)[5].startswith("rank: could not be judged")
    assert [corpus.sample(number).trained for number in range(len(corpus))] == [5, 3]
    _, outcome = chosen(tmp_path, rows, judge=Longest(), best=0.4)
    assert outcome.kept == [1, 2]


# ── what comes of it ─────────────────────────────────────────────────────────────────────────────────────────────


def test_filters_see_only_what_those_before_have_kept(tmp_path: Path) -> None:
    rows = [sort_row("7654321"), sort_row("7654321"), sort_row("21"), sort_row("21")]
    _, outcome = chosen(tmp_path, rows, max_tokens=9, duplicates=True)
    assert outcome.counts == {"readable": 0, "length": 2, "characters": 0, "duplicates": 1}


def test_the_table(tmp_path: Path) -> None:
    rows: list[Any] = [sort_row("21"), "{", sort_row("7654321"), sort_row("21")]
    _, outcome = chosen(tmp_path, rows, max_tokens=9, duplicates=True)
    read, *by_filter, kept = outcome.lines()
    assert (read.split(), kept.split()) == (["read", "4"], ["kept", "1"])
    assert by_filter[0].startswith(
        "  - readable            1   e.g. row 1 (demos.jsonl line 2): the line is no JSON object"
    )
    assert by_filter[1:] == [
        "  - length              1   e.g. row 2 (demos.jsonl line 3): more than 9 tokens",
        "  - characters          0",
        "  - duplicates          1   e.g. row 3 (demos.jsonl line 4): the same as row 0",
    ]


def test_told_to_stop(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        chosen(tmp_path, sort_rows(3), interrupted=True)


def test_samples_of_the_corpus_are_the_tokens_that_were_encoded(tmp_path: Path) -> None:
    turns = [USER, BOT, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "so"}]
    corpus, _ = chosen(tmp_path, [{"messages": turns}, {"messages": [USER, BOT]}], files=chat_files())
    encoder = Encoder(chat_files(), PromptSettings(), "messages")
    said = tuple((turn["role"], turn["content"]) for turn in turns)
    (expected,) = encoder.encode(Demonstration(0, said))
    sample = corpus.sample(0)
    assert np.array_equal(np.concatenate([sample.prompt_ids, sample.token_ids]), expected.ids)
    assert np.array_equal(sample.drawn, expected.trained[len(sample.prompt_ids) :])
    assert bool(sample.drawn[0])
    assert sample.advantage == 1.0
    (tmp_path / "corpus").write_bytes(corpus.as_bytes())
    again = Corpus.read(tmp_path / "corpus")
    assert len(corpus) == len(again) == 2
    assert np.array_equal(again.sample(0).token_ids, sample.token_ids)


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    data = Demonstrations([put(tmp_path / "a.jsonl", sort_rows(300))])
    encoder = Encoder(sort_files(), PromptSettings(), data.layout)
    Choosing(data, encoder, progress=lambda *said: told.append(said)).run()
    assert told == [(0, 300), (256, 300)]
