"""What tells demonstrations apart: roles, borders, system messages, layouts, tool calls, questions of earlier turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit.sft import chat_files, chosen, put, sort_row
from shoal.environments import EnvironmentSettings, build
from shoal.errors import ConfigError
from shoal.trainer.demonstrations.choosing import Asking
from shoal.trainer.demonstrations.course import Course
from shoal.trainer.demonstrations.reading import Demonstrations


def talk(*texts: str, system: str = "") -> dict[str, Any]:
    """A conversation that the user begins."""
    roles = ("user", "assistant")
    said = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *said]}


def gone(tmp: Path, rows: list[dict[str, Any]], **choice: Any) -> list[int]:
    """The rows that are left out."""
    return sorted(chosen(tmp, rows, files=chat_files(), **choice)[1].left_out)


# ── duplicates ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_where_the_prompt_ends_counts(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "completion": "23"}, {"prompt": "12", "completion": "3"}]
    assert gone(tmp_path, rows, duplicates=True) == []


def test_where_there_is_space_counts_but_not_how_much(tmp_path: Path) -> None:
    prompts = ["add 1 11=", "add 11 1=", "add  1 \n11="]
    assert gone(tmp_path, [{"prompt": each, "completion": "12"} for each in prompts], duplicates=True) == [2]


def test_the_system_message_counts(tmp_path: Path) -> None:
    rows = [talk("hi", "yo", system=system) for system in ("in french", "in german", "in french")]
    assert gone(tmp_path, rows, duplicates=True) == [2]


def test_who_says_it_and_what_is_learnt_counts(tmp_path: Path) -> None:
    first = {"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "completion": "c"}
    other = {"prompt": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], "completion": "c"}
    assert gone(tmp_path, [first, other], duplicates=True) == []


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content"])
def test_calls_of_tools_are_not_lost_without_a_word(tmp_path: Path, key: str) -> None:
    called = talk("t", "y")
    called["messages"][1][key] = [{"name": "f"}]
    _, outcome = chosen(tmp_path, [talk("a", "b"), called], files=chat_files())
    [(row, (by, reason))] = outcome.left_out.items()
    assert (row, by) == (1, "readable")
    assert f"{key}, which would be lost" in reason
    prompt = [*called["messages"], {"role": "user", "content": "so?"}]
    _, outcome = chosen(tmp_path, [sort_row("21"), {"prompt": prompt, "completion": "12"}])
    assert list(outcome.left_out) == [1]


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


def test_conversations_that_begin_with_one_question_are_on_one_side(tmp_path: Path) -> None:
    rows = [row for n in range(12) for row in (talk(f"q{n}", "a"), talk(f"Q{n}", "a", "and?", "b"))]
    corpus, _ = chosen(tmp_path, rows, files=chat_files())
    aside = set(Course(validation=6).timetable(corpus.questions)[1].tolist())
    assert len(aside) == 6
    assert all((number in aside) == (number ^ 1 in aside) for number in range(24))
