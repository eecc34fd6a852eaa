"""What tells demonstrations apart: roles, borders, system messages, layouts, tool calls, questions of earlier turns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sftkit import chat_files, chosen, left_out, put, sort_row

from shoal.environments import EnvironmentSettings, build
from shoal.errors import ConfigError
from shoal.trainer.demonstrations.choosing import Asking
from shoal.trainer.demonstrations.course import Course
from shoal.trainer.demonstrations.likeness import PER_BUCKET, Lookalikes, bands_for, plain_text
from shoal.trainer.demonstrations.reading import Demonstrations

SAME, ALIKE = {"duplicates": True}, {"near_duplicates": 0.5}


def talk(*texts: str, system: str = "") -> dict[str, Any]:
    """A conversation that the user begins."""
    roles = ("user", "assistant")
    said = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *said]}


def gone(tmp: Path, rows: list[dict[str, Any]], **choice: Any) -> list[int]:
    """The rows that are left out."""
    return sorted(left_out(chosen(tmp, rows, files=chat_files(), **choice)[1]))


# ── duplicates ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("choice", [SAME, ALIKE])
def test_where_the_prompt_ends_counts(tmp_path: Path, choice: dict[str, Any]) -> None:
    rows = [{"prompt": "1", "completion": "23"}, {"prompt": "12", "completion": "3"}]
    assert gone(tmp_path, rows, **choice) == []


def test_where_there_is_space_counts_but_not_how_much(tmp_path: Path) -> None:
    prompts = ["add 1 11=", "add 11 1=", "add  1 \n11="]
    assert gone(tmp_path, [{"prompt": each, "completion": "12"} for each in prompts], **SAME) == [2]


@pytest.mark.parametrize("choice", [SAME, ALIKE])
def test_the_system_message_counts(tmp_path: Path, choice: dict[str, Any]) -> None:
    rows = [talk("hi", "yo", system=system) for system in ("in french", "in german", "in french")]
    assert gone(tmp_path, rows, **choice) == [2]


def test_a_long_system_message_does_not_make_rows_alike(tmp_path: Path) -> None:
    system = " ".join(f"rule {number}" for number in range(300))
    rows = [talk("what is a fish?", "an animal", system=system), talk("who was Gauss?", "Carl", system=system)]
    assert gone(tmp_path, rows, **ALIKE) == []


def test_who_says_it_and_what_is_learnt_counts(tmp_path: Path) -> None:
    first = {"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "completion": "c"}
    other = {"prompt": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], "completion": "c"}
    assert gone(tmp_path, [first, other], **SAME) == []


# ── near duplicates in bounded time ──────────────────────────────────────────────────────────────────────────────


def templated(number: int) -> bytes:
    asked = f"Question {number}: what is {number}+{7 * number}? Explain in detail please, step by step."
    return plain_text([("user", asked), ("", f"The answer to this is obtained by adding: {8 * number}")])


def test_templated_rows_take_the_time_of_their_number() -> None:
    known, took = Lookalikes(0.9), []
    for start in (0, 500):
        began = time.process_time()
        for number in range(start, start + 500):
            known.earlier(number, templated(10_000 + 37 * number))
        took.append(time.process_time() - began)
    assert known.compared <= 1_000 * PER_BUCKET * bands_for(0.9)[0]
    assert took[1] < 3 * took[0] + 0.2
    assert known.earlier(9_999, templated(10_000 + 37 * 400)) == 400  # among so many of a form, the same is found


def test_bands_find_what_is_as_alike_as_the_threshold() -> None:
    for percent in range(50, 101):
        count, size = bands_for(percent / 100)
        assert count * size <= 128
        assert (1 - (percent / 100) ** size) ** count <= 1e-3


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content"])
def test_calls_of_tools_are_not_lost_without_a_word(tmp_path: Path, key: str) -> None:
    called = talk("t", "y")
    called["messages"][1][key] = [{"name": "f"}]
    _, outcome = chosen(tmp_path, [talk("a", "b"), called], files=chat_files())
    [(row, (by, reason))] = left_out(outcome).items()
    assert (row, by) == (1, "readable")
    assert f"{key}, which would be lost" in reason
    prompt = [*called["messages"], {"role": "user", "content": "so?"}]
    _, outcome = chosen(tmp_path, [sort_row("21"), {"prompt": prompt, "completion": "12"}])
    assert list(left_out(outcome)) == [1]


def test_files_of_two_layouts_are_refused_by_name(tmp_path: Path) -> None:
    chat, lines = put(tmp_path / "chat.jsonl", [talk("a", "b")]), put(tmp_path / "d24.jsonl", [sort_row("21")])
    pq.write_table(pa.Table.from_pylist([sort_row("54")]), tmp_path / "b.parquet")
    message = r"d24\.jsonl has no column messages, which .*chat\.jsonl has; it has prompt, completion"
    with pytest.raises(ConfigError, match=message):
        Demonstrations([chat, lines])
    with pytest.raises(ConfigError, match=r"chat\.jsonl has no column prompt.*; it has messages"):
        Demonstrations([lines, chat])
    with pytest.raises(ConfigError, match=r"b\.parquet has no column messages"):
        Demonstrations([chat, tmp_path / "b.parquet"])


# ── questions of earlier turns ───────────────────────────────────────────────────────────────────────────────────


def test_a_held_out_question_in_any_turn_is_left_out(tmp_path: Path) -> None:
    questions = put(tmp_path / "q.jsonl", [{"question": f"{n} plus 1?", "answer": str(n + 1)} for n in range(20)])
    data = build(EnvironmentSettings(name="dataset", data=questions, options={"grader": "exact"}))
    asked, trained = data.tasks("held_out")[0].prompt, data.tasks("train")[0].prompt
    rows = [
        talk(asked, "7"),
        talk(asked, "7", "thanks", "welcome"),
        talk("hi", "hello", asked.upper(), "7"),
        talk("hi", "hello", trained, "7"),
    ]
    assert gone(tmp_path, rows, asking=Asking(data)) == [0, 1, 2]


def sides(tmp: Path, rows: list[dict[str, Any]], validation: int | None = None) -> list[bool]:
    """Of each row whether it is kept for validation."""
    corpus, _ = chosen(tmp, rows, files=chat_files())
    aside = set(Course(validation=validation).timetable(corpus)[1].tolist())
    assert len(corpus) == len(rows)
    return [number in aside for number in range(len(rows))]


def test_conversations_that_share_a_question_are_on_one_side(tmp_path: Path) -> None:
    families = [
        [talk(f"q{n}", "a"), talk(f"q{n}", "a", f"and {n}", "b"), talk(f"hello {n}", "b", f"Q{n}", "a")]
        for n in range(12)
    ]
    found = sides(tmp_path, [row for family in families for row in family], 9)
    by_family = [found[start : start + 3] for start in range(0, len(found), 3)]
    assert all(len(set(family)) == 1 for family in by_family)
    assert sum(found) == 9


def test_what_is_said_everywhere_ties_nothing(tmp_path: Path) -> None:
    rows = [talk(f"q{n}", "a", "thanks", "welcome") for n in range(60)]
    assert sum(sides(tmp_path, rows)) == 3


def test_by_itself_validation_never_takes_most_of_the_rows(tmp_path: Path) -> None:
    chain = [talk(f"q{n}", "a", f"q{n + 1}", "b") for n in range(50)]  # each shares a question with the next
    assert sum(sides(tmp_path, chain)) == 0
    found = sides(tmp_path, [*chain, *(talk(f"other {n}", "a") for n in range(10))])
    assert not any(found[:50])
    assert sum(found) == 3
