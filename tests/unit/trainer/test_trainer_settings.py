"""The [trainer] section: its defaults are usable, its mistakes are refused, and reading it costs no torch."""

import subprocess
import sys
from typing import get_args

import pytest
from pydantic import AfterValidator, BaseModel, ValidationError

from shoal.algorithms.registry import ADVANTAGES, LOSSES
from shoal.trainer.settings import AdvantageName, LossName, TrainerSettings


def test_the_words_are_those_of_the_registry_and_every_setting_is_described() -> None:
    assert set(get_args(AdvantageName)) == set(ADVANTAGES)
    assert set(get_args(LossName)) == set(LOSSES)
    assert [name for name, field in TrainerSettings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(("values", "message"), [
    ({"learning_rat": 1e-3}, "Extra inputs"), ({"learning_rate": 0}, "greater than 0"),
    ({"clip_delta": 1.1}, "must be above 1"),
    ({"clip_delta": 1.3, "objective": {"clip_high": 0.4}}, r"must be above 1 \+ objective.clip_high \(1.4\)"),
    ({"betas": (0.9, 1.0)}, r"must both be in \[0, 1\)"), ({"minibatches": 0}, "greater than or equal to 1"),
    ({"publish_dtype": "int4"}, "float32"),
    ({"learning_rate": float("inf")}, "inf is not a finite number that float32 holds"),
    ({"learning_rate": 1e39}, "not a finite number that float32 holds"),
    ({"learning_rate": 1e38}, r"learning_rate \(1e\+38\) / \(1 - betas\[0\]\) is more than float32 holds"),
    ({"betas": (float("nan"), 0.9)}, "not a finite number"), ({"weight_decay": float("inf")}, "not a finite number"),
    ({"objective": {"kl": float("inf")}}, "not a finite number"),
    ({"lora": {"alpha": float("inf")}}, "not a finite number"),
    ({"guards": {"divergence": {"limit": float("inf")}}}, "not a finite number"),
    ({"batch_deadline_s": 1e30}, "less than or equal to"),
    ({"advantage": "dr_grpo", "loss": "gspo"}, r'set objective.normalisation to "samples" or "constant"'),
])  # fmt: skip
def test_mistakes_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerSettings.model_validate(values)


@pytest.mark.parametrize(("values", "expected"), [
    ({}, (0.2, None, "tokens")), ({"loss": "gspo"}, (3e-4, 4e-4, "samples")),
    ({"loss": "gspo", "clip_epsilon": 0.2}, (0.2, None, "samples")),
    ({"loss": "gspo", "objective": {"clip_high": 1e-3}}, (3e-4, 1e-3, "samples")),
    ({"loss": "gspo", "objective": {"normalisation": "tokens"}}, (3e-4, 4e-4, "tokens")),
    ({"advantage": "dr_grpo"}, (0.2, None, "constant")),
    ({"advantage": "dr_grpo", "objective": {"normalisation": "tokens"}}, (0.2, None, "tokens")),
    ({"advantage": "dr_grpo", "loss": "gspo", "objective": {"normalisation": "samples"}}, (3e-4, 4e-4, "samples")),
    ({"loss": "cispo"}, (0.2, None, "tokens")),  # its cap is then objective.ratio_cap
])  # fmt: skip
def test_one_word_is_enough_and_what_is_given_wins(values, expected):
    settings = TrainerSettings.model_validate(values)
    objective = settings.objective
    assert (settings.clip_epsilon, objective.clip_high, objective.normalisation) == expected
    assert TrainerSettings.model_validate_json(settings.model_dump_json()) == settings, "a stored recipe says the same"


def test_every_number_with_a_point_is_one_that_float32_holds() -> None:
    def tables(model: type[BaseModel]) -> list[type[BaseModel]]:
        annotations = [field.annotation for field in model.model_fields.values()]
        inner = [each for annotation in annotations for each in (annotation, *get_args(annotation))]
        found = [each for each in inner if isinstance(each, type) and issubclass(each, BaseModel)]
        return [model, *(table for each in found for table in tables(each))]

    plain = [
        f"{table.__name__}.{name}"
        for table in tables(TrainerSettings)
        for name, field in table.model_fields.items()
        if field.annotation is float and not any(isinstance(each, AfterValidator) for each in field.metadata)
    ]
    assert plain == []


def test_settings_and_folder_are_read_without_torch() -> None:
    code = "import sys, shoal.trainer.settings, shoal.trainer.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
