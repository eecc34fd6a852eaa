"""What a run asks is checked before it starts: with its length text, by its chat template, as the hub will send it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.engines.asking import Asking
from shoal.environments import EnvironmentSettings, Task, build
from shoal.errors import UnusableTask, UserError
from shoal.models import TextTokenizer, model_folder, read_files
from shoal.run.preflight import check_ingredients
from shoal.run.recipe import Recipe

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
    ("prompt", "sentence"), [("", "has no tokens"), ("é", "does not know"), ("1" * 300, "has room for 246")]
)
def test_a_prompt_that_the_model_cannot_take_makes_its_task_unusable(prompt: str, sentence: str) -> None:
    with pytest.raises(UnusableTask, match=sentence):
        asking().ids(Task("t", prompt, ""))


def test_the_length_text_counts() -> None:
    long_text = {"targets": [5], "text": "{target}" + "!" * 240}
    asking().check(Task("t", "12345678=", ""))
    with pytest.raises(UnusableTask, match="has room for 246"):
        asking(length=long_text).check(Task("t", "12345678=", ""))
    with pytest.raises(UserError, match="has room for"):
        check_ingredients(recipe(environment={"length": long_text}))


def test_targets_beyond_what_may_be_generated_are_refused() -> None:
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


def test_a_template_that_opens_thinking_is_told_to_the_owner(
    chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    lines = [json.dumps({"question": prompt, "answer": "4"}) for prompt in prompts]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    data = {"name": "dataset", "data": str(folder / "rows.jsonl"), "options": {"grader": "mathematics"}}
    return {"environment": data}


def test_a_few_rows_that_cannot_be_asked_are_passed_over_and_many_are_a_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [f"{n}+{n}=" for n in range(30)]
    check_ingredients(recipe(**rows(tmp_path, *good, "é=")))
    assert "1 of all 25 train tasks cannot be asked" in caplog.text
    with pytest.raises(UserError, match="does not know"):
        check_ingredients(recipe(**rows(tmp_path, *good[:4], *("é" * n for n in range(1, 30)))))


def test_a_judge_that_is_not_there_is_said(tmp_path: Path) -> None:
    judge = {"label": "taste", "path": str(tmp_path / "none")}
    with pytest.raises(UserError, match="the path of taste is no folder"):
        check_ingredients(recipe(environment={"judges": [judge]}))
