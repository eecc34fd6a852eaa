"""Train and held out share no question, however it is spaced and capitalised; solve rates; digests for leak checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from datakit import described, open_data, own_cache, refused, write_jsonl, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from shoal.environments.protocol import SPLITS
from shoal.environments.questions import ascii_digest, prompt_digest, question_digest

__all__ = ["own_cache"]


@given(st.text(max_size=60))
def test_spaces_case_and_width_do_not_make_another_question(text: str) -> None:
    digest = prompt_digest(text)
    assert len(digest) == 16
    assert prompt_digest(f"  {text.replace(' ', '   ')}\n") == digest
    if text.isascii():
        assert prompt_digest(text.upper()) == prompt_digest(text.lower()) == ascii_digest(text.encode()) == digest


def test_what_makes_another_question_and_what_does_not() -> None:
    assert prompt_digest("２ ＋ ２") == prompt_digest("2+2")  # noqa: RUF001
    assert prompt_digest("STRASSE") == prompt_digest("straße")
    assert prompt_digest("2+2") != prompt_digest("2-2")
    assert prompt_digest("a\x1cb") == prompt_digest("ab")


def test_what_was_said_before_makes_another_question(tmp_path: Path) -> None:
    """The last words of many conversations are the same."""
    first, second = ([("user", text), ("assistant", "4")] for text in ("2+2?", "3+1?"))
    assert len({question_digest("And doubled?", history) for history in (first, second, ())}) == 3
    assert question_digest("and doubled ?", [("user", "2 + 2 ?"), ("assistant", "4")]) == question_digest(
        "And doubled?", first
    )
    assert question_digest("2+2?", [("system", "Be brief.")]) == prompt_digest("2+2?")
    said = [[("user", f"{n}+1?"), ("assistant", "?"), ("user", "So?")] for n in range(20)]
    rows = [{"prompt": [{"role": role, "content": text} for role, text in talk], "answer": "1"} for talk in said]
    environment = open_data(write_jsonl(tmp_path / "a.jsonl", rows), held_out_size=4)
    assert (len(environment.tasks("train")), len(environment.tasks("held_out"))) == (16, 4)
    assert list(environment.prompt_digests("train")) == [
        question_digest(task.prompt, task.history) for task in environment.tasks("train")
    ]


def test_a_held_out_question_is_never_trained_on(tmp_path: Path) -> None:
    rows = described(60)
    for number, row in enumerate(rows):
        row["prompt"] = f"What is {number % 20}?" if number < 40 else f"WHAT  is {number % 20} ?\n"
    environment = open_data(write_parquet(tmp_path / "a.parquet", rows), held_out_size=3)
    held_out = [task.prompt for task in environment.tasks("held_out")]
    assert len(held_out) == 3
    aside = {prompt_digest(prompt) for prompt in held_out}
    assert len(aside) == 3
    assert not aside & {prompt_digest(task.prompt) for task in environment.tasks("train")}
    assert len(environment.tasks("train")) == 51
    assert environment.splits.shared == 6


def test_the_split_depends_on_content_and_not_on_place(tmp_path: Path) -> None:
    rows = described(50)
    one = open_data(write_parquet(tmp_path / "a.parquet", rows), held_out_size=5)
    other = open_data(write_parquet(tmp_path / "b.parquet", rows[::-1]), held_out_size=5)
    prompts = [{task.prompt for task in environment.tasks("held_out")} for environment in (one, other)]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 5


def test_at_most_a_fifth_is_held_out(tmp_path: Path) -> None:
    environment = open_data(write_parquet(tmp_path / "a.parquet", described(10)), held_out_size=256)
    assert (len(environment.tasks("train")), len(environment.tasks("held_out"))) == (8, 2)


def test_a_held_out_file_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write_parquet(tmp_path / "train.parquet", described(30))
    shared = [{"question": "what is 3+3?", "answer": "6"}, {"question": "WHAT IS 8 + 8 ?", "answer": 16}]
    path = write_jsonl(tmp_path / "test.jsonl", [*shared, {"question": "New?", "answer": "1"}])
    environment = open_data(train, held_out_size=2, held_out=path)
    assert [task.id for task in environment.tasks("held_out")] == ["held_out/0", "held_out/1"]
    task = environment.tasks("held_out")[1]
    assert environment.task(task.id) == task
    assert environment.score(task, "\\boxed{16}").value == 1.0
    ids = {task.id for task in environment.tasks("train")}
    assert len(ids) == 28
    assert not ids & {"3/p3", "8/p8"}
    assert "2 rows left out of training: a held-out question is repeated" in caplog.text
    alone = open_data(train)
    assert environment.data_digest != alone.data_digest
    write_jsonl(path, [*shared, {"question": "Newer?", "answer": "1"}])
    assert open_data(train, held_out_size=2, held_out=path).digest != environment.digest


def test_all_questions_of_a_held_out_file_count_as_held_out(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", described(10))
    assert "all of its questions are held-out ones" in refused(path, held_out_size=1, held_out=path)


def test_solve_rates_outside_the_band_are_left_out(tmp_path: Path) -> None:
    rows = described(27, solve_rate_tiny={1: None})
    for path in (write_parquet(tmp_path / "a.parquet", rows), write_jsonl(tmp_path / "a.jsonl", rows)):
        environment = open_data(path, held_out_size=1, keep_solve_rate=[0.125, 0.5])
        kept = {int(task.id.partition("/")[0]) for split in ("train", "held_out") for task in environment.tasks(split)}
        assert kept == {row for row in range(27) if 1 <= row % 9 <= 4 and row != 1}
        assert environment.problems.count == 0


def test_which_column_holds_the_solve_rates_must_be_clear(tmp_path: Path) -> None:
    rows = [{**row, "solve_rate_large": 0.5} for row in described(10)]
    path = write_parquet(tmp_path / "a.parquet", rows)
    assert len(open_data(path, keep_solve_rate=[0.5, 0.5], solve_rate="solve_rate_large").tasks("train")) == 8
    for band, column, said in [
        ([0.0, 1.0], "", "one column of solve rates, not solve_rate_tiny, solve_rate_large"),
        ([0.5, 0.5], "prompt", "holds text, not solve rates"),
        ([0.5, 0.1], "", "the lower first"),
        ([0.13, 0.2], "solve_rate_tiny", "no row has a solve rate within"),
    ]:
        assert said in refused(path, keep_solve_rate=band, solve_rate=column)


def test_the_digests_of_a_split_are_those_of_its_prompts(tmp_path: Path) -> None:
    environment = open_data(write_parquet(tmp_path / "a.parquet", described(30)))
    for split in SPLITS:
        assert list(environment.prompt_digests(split)) == [
            prompt_digest(task.prompt) for task in environment.tasks(split)
        ]
    path = write_jsonl(tmp_path / "test.jsonl", [{"question": "New?", "answer": "1"}])
    other = open_data(tmp_path / "a.parquet", held_out=path)
    assert list(other.prompt_digests("held_out")) == [prompt_digest("new?")]
