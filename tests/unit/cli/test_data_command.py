"""`shoal data`: what is wrong with a data set, and which task each unit of a run is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kit import Capture, Logs
from kit.cli import told
from kit.data import own_cache as own_cache
from kit.data import write_jsonl
from shoal.cli.main import main
from shoal.engines.asking import Asking
from shoal.environments import EnvironmentSettings, Task, build, identity_of
from shoal.errors import UnusableTask, UserError
from shoal.hub.state.draws import task_index
from shoal.models import TextTokenizer, model_folder, read_files
from shoal.run.preflight import check_ingredients
from shoal.run.recipe import Recipe


def write(path: Path, count: int, bad: dict[int, str] | None = None) -> Path:
    rows = [{"id": f"q{row}", "question": f"{row} + 1?", "answer": str(row + 1)} for row in range(count)]
    for row, question in (bad or {}).items():
        rows[row]["question"] = question
    return write_jsonl(path, rows)


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [("{}", "columns (mathematics)"), ("{} --set grader=exact --set format=columns", "columns (exact)"),
     ("aime:{}", "aime (mathematics)")],
)  # fmt: skip
def test_a_good_data_set(tmp_path: Path, capsys: Capture, arguments: str, layout: str) -> None:
    given = arguments.format(write(tmp_path / "good.jsonl", 40)).split()
    said = told(capsys, 0, "data", "check", *given).out
    assert f"40 rows in 1 file, format {layout}: 32 to train on, 8 held out; data digest " in said
    assert said.endswith("every row can be used\n")
    assert len(told(capsys, 0, "data", "check", *given, "--order", 2).out.splitlines()) == 4


def test_bad_rows_are_listed_and_end_the_command_with_2(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path / "bad.jsonl", 100, dict.fromkeys(range(0, 50, 2), " "))
    with path.open("a") as file:
        file.write('{"id": "last", "question": "?", "answer": null}\n')
    caught = told(capsys, 2, "data", "check", path)
    empty, missing = caught.out.splitlines()[2:]
    assert empty.startswith("25 rows: question is empty: row 0 (bad.jsonl line 1), row 2 (bad.jsonl line 3), ")
    assert empty.endswith(", row 38 (bad.jsonl line 39), 5 more")
    assert missing == "1 row: answer is missing: 1 more"
    assert caught.err == "26 rows cannot be used: a run leaves them out\n"


def test_kinds_are_told_with_their_numbers(tmp_path: Path, capsys: Capture) -> None:
    kinds = ["MCQ"] * 3 + ["proof"] * 2
    rows = [
        {"question": f"{row} + 1?", "answer": "proof" if kind == "proof" else "B", "question_type": kind}
        for row, kind in enumerate(kinds)
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    caught = told(capsys, 2, "data", "check", path)
    said = caught.out.splitlines()
    reason = "because no row can be used of kind 'proof', 2 rows (row 3 (a.jsonl line 4) cannot "
    assert caught.err.startswith(f"2 rows cannot be used: a run refuses this data, {reason}")
    without = "to run without them: --set environment.options.bad_rows=skip\n"
    assert caught.err.endswith(without)
    assert said[1:] == [
        "  kind 'MCQ': 3 rows, 3 can be used, 3 to train on",
        "  kind 'proof': 2 rows, 0 can be used, 0 to train on",
        "2 rows: question_type is 'proof': no grader judges proofs: row 3 (a.jsonl line 4), row 4 (a.jsonl line 5)",
    ]
    said = told(capsys, 2, "data", "check", path, "--order", 1).err
    assert "kind 'proof', 2 rows (row 3 (a.jsonl line 4) cannot be used" in said
    for spelling in ("bad_rows=skip", "environment.options.bad_rows=skip"):
        skipped = told(capsys, 0, "data", "check", path, "--set", spelling).err
        assert skipped == "2 rows cannot be used: a run leaves them out\n"
    refused = told(capsys, 2, "data", "check", path, "--set", "bad_rows=refuse").err
    assert refused.endswith(f'a run refuses this data, as bad_rows = "refuse" says; {without}')


def test_the_counts_add_up(tmp_path: Path, capsys: Capture) -> None:
    rows: list[dict[str, object]] = [
        {"question": f"{row} + 1?", "answer": str(row + 1), "solve_rate": row / 100} for row in range(100)
    ]
    rows[3]["question"], rows[50]["question"] = "", "7+1?"
    rows[40]["answer"], rows[90]["answer"] = None, " "
    write_jsonl(tmp_path / "a.jsonl", rows)
    other = write(tmp_path / "b.jsonl", 10, {2: ""})
    with other.open("a") as file:
        file.write('{"id": "last", "question": "?", "answer": null}\n')
    arguments = [f"held_out={other}", "keep_solve_rate=[0.0, 0.8]"]
    caught = told(capsys, 2, "data", "check", tmp_path / "a.jsonl", *(part for a in arguments for part in ("--set", a)))
    assert (
        "100 rows in 1 file, format columns (mathematics): 70 to train on, 18 outside the band of solve rates,"
        f" 9 with a held-out question, 3 that cannot be used; 11 rows in {other}: 9 held out, 2 that cannot be used;"
    ) in caught.out
    assert caught.err == "5 rows cannot be used: a run leaves them out\n"


def test_check_says_what_is_wrong_once_and_others_warn(tmp_path: Path, capsys: Capture, caplog: Logs) -> None:
    path = write(tmp_path / "a.jsonl", 20, {7: ""})
    main(["data", "check", str(path)])
    assert capsys.readouterr().err == "1 row cannot be used: a run leaves it out\n"
    assert caplog.text == ""
    assert main(["data", "check", str(path), "--order", "1"]) == 0
    assert "1 of 20 rows cannot be used and are left out: row 7 (a.jsonl line 8)" in caplog.text


def test_the_order_is_that_of_a_run(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path / "a.jsonl", 50, {7: ""})
    assert main(["data", "check", str(path), "--seed", "3", "--from", "5", "--order", "4"]) == 0
    head, names, *rows = capsys.readouterr().out.splitlines()
    environment = build(EnvironmentSettings(name="dataset", data=path))
    tasks = environment.tasks("train")
    digests = f"environment digest {environment.digest}, data digest {identity_of(environment).data_digest}"
    assert head.startswith(f"# {len(tasks)} tasks, seed 3, {digests}")
    assert names == "unit\trow\tid"
    for unit, row in zip(range(5, 9), rows, strict=True):
        task = tasks[task_index(len(tasks), 3, unit)]
        assert row == f"{unit}\t{task.id.partition('/')[0]}\t{task.id}"


def test_order_continues_after_an_unusable_task(tmp_path: Path, capsys: Capture) -> None:
    rows = [{"id": f"q{row}", "question": f"{row} + 1?", "answer": "" if row % 2 else "1"} for row in range(50)]
    said = told(capsys, 0, "data", "check", write_jsonl(tmp_path / "a.jsonl", rows), "--order", "30").out
    shown = [int(line.split("\t")[1]) for line in said.splitlines()[2:]]
    assert len(shown) == 30
    assert all(row % 2 == 0 for row in shown)


def test_a_recipe_names_its_data_and_its_seed(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path / "a.jsonl", 40)
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'[run]\nname = "mine"\nseed = 9\n[environment]\nname = "dataset"\ndata = "{path}"\n')
    of_recipe = told(capsys, 0, "data", "check", recipe, "--order", "2").out
    assert told(capsys, 0, "data", "check", path, "--seed", "9", "--order", "2").out == of_recipe
    assert main(["data", "check", str(recipe)]) == 0


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate(sections, strict=False)


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(model_folder("tiny"), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def asking(**environment: Any) -> Asking:
    built = build(EnvironmentSettings.model_validate(environment))
    return Asking(read_files(model_folder("tiny")), built, 10)


def test_without_settings_a_prompt_is_its_text() -> None:
    files = read_files(model_folder("tiny"))
    assert asking().ids(Task("t", "3142=", "")) == TextTokenizer(files).encode("3142=")


@pytest.mark.parametrize(
    ("prompt", "sentence"), [("", "has no tokens"), ("é", "does not know"), ("1" * 300, "room for 246")]
)
def test_a_prompt_that_the_model_cannot_take_makes_its_task_unusable(prompt: str, sentence: str) -> None:
    with pytest.raises(UnusableTask, match=sentence):
        asking().ids(Task("t", prompt, ""))


def test_room_of_the_model_counts_for_prompts_length_texts_and_targets() -> None:
    files = dict(read_files(model_folder("tiny")))
    config = json.loads(files["config.json"])
    del config["max_position_embeddings"]
    files["config.json"] = json.dumps({**config, "n_positions": 12}).encode()
    with pytest.raises(UnusableTask, match="room for 2 tokens"):
        Asking(files, build(EnvironmentSettings()), 10).check(Task("t", "12345678=", ""))
    long_text = {"targets": [5], "text": "{target}" + "!" * 240}
    asking().check(Task("t", "12345678=", ""))
    with pytest.raises(UnusableTask, match="room for 246"):
        asking(length=long_text).check(Task("t", "12345678=", ""))
    with pytest.raises(UserError, match="room for"):
        check_ingredients(recipe(environment={"length": long_text}))
    with pytest.raises(UserError, match=r"targets has 4000, but run.max_new_tokens is \d+"):
        check_ingredients(recipe(environment={"length": {"targets": [5, 4000]}}))


def test_the_template_and_its_settings_count(chat_model: Path) -> None:
    check_ingredients(recipe(model={"path": str(chat_model)}, environment={"prompt": {"system": "Sort."}}))
    with pytest.raises(UserError, match="does not know"):
        check_ingredients(recipe(model={"path": str(chat_model)}, environment={"prompt": {"system": "Où?"}}))
    with pytest.raises(UserError, match="no chat template"):
        check_ingredients(recipe(environment={"prompt": {"chat": True}}))
    (chat_model / "chat_template.jinja").write_text("{{ raise_exception('no, thanks') }}")
    with pytest.raises(UserError, match="no, thanks"):
        check_ingredients(recipe(model={"path": str(chat_model)}))


def test_a_template_that_opens_thinking_is_told_to_the_owner(chat_model: Path, caplog: Logs) -> None:
    model = {"path": str(chat_model)}
    check_ingredients(recipe(model=model))
    assert "thinking" not in caplog.text
    (chat_model / "chat_template.jinja").write_text(TEMPLATE + "<think>\n")
    check_ingredients(recipe(model=model))
    assert "graded as an answer. Set it to '<think>\\n'" in caplog.text
    caplog.clear()
    check_ingredients(recipe(model=model, environment={"prompt": {"thinking": "<think>\n"}}))
    assert "thinking" not in caplog.text


def test_thinking_must_close_where_the_answer_begins_with_it() -> None:
    """The template has opened the block; what the model draws begins inside it."""
    task = Task("t", "2+2=", "4", "mathematics")
    data = {"name": "dataset", "data": "recipes/data/sums.jsonl"}
    begun = build(EnvironmentSettings.model_validate({**data, "prompt": {"thinking": "<think>\n"}}))
    plain = build(EnvironmentSettings.model_validate(data))
    said = ["it is \\boxed{4}", "easy</think>\\boxed{4}", "\\boxed{4}</think>\\boxed{5}"]
    assert [begun.score(task, completion).value for completion in said] == [0.0, 1.0, 0.0]
    assert [plain.score(task, completion).value for completion in said] == [1.0, 1.0, 0.0]


def rows(folder: Path, *prompts: str) -> dict[str, Any]:
    path = write_jsonl(folder / "rows.jsonl", [{"question": prompt, "answer": "4"} for prompt in prompts])
    data = {"name": "dataset", "data": str(path), "options": {"grader": "mathematics"}}
    return {"environment": data}


def test_a_few_rows_that_cannot_be_asked_are_passed_over_and_many_are_a_mistake(tmp_path: Path, caplog: Logs) -> None:
    good = [f"{n}+{n}=" for n in range(30)]
    check_ingredients(recipe(**rows(tmp_path, *good, "é=")))
    assert "1 of all 25 train tasks cannot be asked" in caplog.text
    with pytest.raises(UserError, match="does not know"):
        check_ingredients(recipe(**rows(tmp_path, *good[:4], *("é" * n for n in range(1, 30)))))
