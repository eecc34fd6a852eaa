"""recipes/intellect2.toml is the described recipe, number for number; a change of it is a decision, taken here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kit.sandbox import needs_bubblewrap
from shoal.cli.main import main
from shoal.run.preflight import check_ingredients
from shoal.run.recipe import load_recipe

ROOT = Path(__file__).parents[3]
PATH = ROOT / "recipes" / "intellect2.toml"
TWIN = ROOT / "recipes" / "intellect2-tiny.toml"
PAGE = ROOT / "docs" / "concepts" / "intellect2.md"

DESCRIBED = {
    "run": {"groups_per_step": 256, "group_size": 16, "max_staleness": 2, "temperature": 0.6, "max_new_tokens": 16000},
    "trainer": {
        "learning_rate": 3e-7,
        "betas": (0.9, 0.99),
        "weight_decay": 0.01,
        "warmup_steps": 25,
        "grad_clip": 0.1,
        "minibatches": 8,
        "advantage": "group_mean_sample_std",
        "loss": "two_sided_clip",
        "clip_epsilon": 0.2,
        "clip_delta": 4.0,
        "mask_truncated": False,
        "micro_batch_tokens": 32768,
    },
    "trainer.objective": {
        "kl": 0.001,
        "entropy": 1e-4,
        "normalisation": "tokens",
        "ratio_base": "recomputed",
        "clip_high": None,
    },
    "trainer.memory": {"precision": "bfloat16", "recompute": True, "compile": False},
    "environment.length": {
        "form": "exact",
        "alpha": 0.0003,
        "count_eos": True,
        "targets": (2000, 4000, 6000, 8000, 10000),
        "text": "Think for {target} tokens before giving a response.",
    },
    "environment.prompt": {"thinking": "<think>\n"},
    "hub": {"drop_equal": "total"},
}
# In one source and not in the other: both numbers stand beside the setting.
BOTH_SAID = {
    "keep_solve_rate": "0.1 to 0.8",
    "targets": "1000 to 5000",
    "max_new_tokens": "16,000 with the prompt",
    "warmup_steps": "optimizer steps",
    "advantage": "std by n",
    "ratio_base": '"behaviour"',
    "kl": "0.002",
    "entropy": "1e-3",
    "drop_equal": '"task"',
    "temperature": "1.0",
}


def test_its_numbers_are_those_that_are_described() -> None:
    recipe = load_recipe(PATH)
    for table, values in DESCRIBED.items():
        section = recipe
        for name in table.split("."):
            section = getattr(section, name)
        assert {name: getattr(section, name) for name in values} == values, table
    assert recipe.environment.options["keep_solve_rate"] == [0.125, 0.5]


@pytest.mark.parametrize("setting", sorted(BOTH_SAID))
def test_where_sources_differ_both_numbers_stand_beside_the_setting(setting: str) -> None:
    _before, _, after = PATH.read_text().partition(f"\n{setting} = ")
    beside = "".join(re.findall(r"^.*#.*\n(?:^ +#.*\n)*", after, re.MULTILINE)[:1])
    assert BOTH_SAID[setting] in beside


def test_the_twin_has_the_same_mechanisms() -> None:
    described, twin = load_recipe(PATH), load_recipe(TWIN)
    for name in ("advantage", "loss", "minibatches", "warmup_steps", "clip_epsilon", "clip_delta", "mask_truncated"):
        assert getattr(twin.trainer, name) == getattr(described.trainer, name), name
    assert twin.trainer.objective == described.trainer.objective
    assert twin.hub.drop_equal == described.hub.drop_equal
    assert twin.run.max_staleness == described.run.max_staleness
    assert twin.environment.length is not None
    assert described.environment.length is not None
    for name in ("form", "count_eos"):
        assert getattr(twin.environment.length, name) == getattr(described.environment.length, name), name


def test_the_page_names_files_that_exist() -> None:
    """docs/concepts/intellect2.md: where each mechanism is."""
    named = re.findall(r"`([a-z_]+(?:/[a-z_0-9.]+)+)`", PAGE.read_text())
    assert len(named) > 80
    assert [path for path in named if not (ROOT / "src" / "shoal" / path).exists() and path != "src/shoal"] == []


def test_its_numbers_are_written_down_and_not_left_to_defaults() -> None:
    written = tomllib.loads(PATH.read_text())
    for table, values in DESCRIBED.items():
        section = written
        for name in table.split("."):
            section = section[name]
        assert {name for name, value in values.items() if value is not None} <= section.keys(), table


@needs_bubblewrap
def test_a_dry_run_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(PATH), "--dry-run"]) == 0
    assert "what needs it was not checked" in capsys.readouterr().err


@needs_bubblewrap
def test_all_but_the_model_fits_together() -> None:
    """What the file says to try: the tiny model in place of the large one, and lengths that it has room for."""
    small = ["model.path=tiny", "run.max_new_tokens=64", "environment.length.targets=[16,32]"]
    assert all(setting in PATH.read_text() for setting in small)
    environment = check_ingredients(load_recipe(PATH, small))
    # 28 rows, of which one is solved always and one never; a fifth is held out
    assert len(environment.tasks("train")) + len(environment.tasks("held_out")) == 26
