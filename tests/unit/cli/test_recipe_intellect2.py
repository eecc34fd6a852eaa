"""recipes/intellect2.toml is the described recipe, number for number; a change of it is a decision, taken here."""

from __future__ import annotations

import tomllib
from pathlib import Path

from sandboxkit import needs_bubblewrap
from shoal.cli.ingredients import check_ingredients
from shoal.cli.recipe import load_recipe

PATH = Path(__file__).parents[3] / "recipes" / "intellect2.toml"

DESCRIBED = {
    "run": {"groups_per_step": 256, "group_size": 16, "max_staleness": 2, "temperature": 0.6, "max_new_tokens": 32768},
    "trainer": {
        "learning_rate": 3e-7,
        "betas": (0.9, 0.99),
        "weight_decay": 0.01,
        "warmup_steps": 25,
        "grad_clip": 0.1,
        "minibatches": 8,
        "advantage": "group_mean_std",
        "loss": "two_sided_clip",
        "clip_epsilon": 0.2,
        "clip_delta": 4.0,
        "micro_batch_tokens": 32768,
    },
    "trainer.objective": {"kl": 0.001, "entropy": 1e-4, "normalisation": "tokens", "clip_high": None},
    "trainer.memory": {"precision": "bfloat16", "recompute": True, "compile": False},
    "environment.length": {
        "form": "exact",
        "alpha": 0.0003,
        "targets": (2000, 4000, 6000, 8000, 10000),
        "text": "Think for {target} tokens before giving a response.",
    },
}


def test_its_numbers_are_those_that_are_described() -> None:
    recipe = load_recipe(PATH)
    for table, values in DESCRIBED.items():
        section = recipe
        for name in table.split("."):
            section = getattr(section, name)
        assert {name: getattr(section, name) for name in values} == values, table
    assert recipe.environment.options["keep_solve_rate"] == [0.125, 0.5]


def test_what_is_not_described_is_chosen_openly() -> None:
    written = tomllib.loads(PATH.read_text())["trainer"]
    assert (written["mask_truncated"], written["processes"]) == (True, 8)


def test_its_numbers_are_written_down_and_not_left_to_defaults() -> None:
    written = tomllib.loads(PATH.read_text())
    for table, values in DESCRIBED.items():
        section = written
        for name in table.split("."):
            section = section[name]
        assert {name for name, value in values.items() if value is not None} <= section.keys(), table


@needs_bubblewrap
def test_all_but_the_model_fits_together() -> None:
    """What the file says to try: the tiny model in place of the large one, and lengths that it has room for."""
    small = ["model.path=tiny", "run.max_new_tokens=64", "environment.length.targets=[16,32]"]
    assert all(setting in PATH.read_text() for setting in small)
    environment = check_ingredients(load_recipe(PATH, small))
    # 28 rows, of which one is solved always and one never; a fifth is held out
    assert len(environment.tasks("train")) + len(environment.tasks("held_out")) == 26
