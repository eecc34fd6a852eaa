"""The configuration surface is pinned: a new setting is a decision, taken here.

There are 102 settings, and 77 more in tables that a recipe may have, or have several of (`[[environment.mix]]`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from shoal.errors import ConfigError
from shoal.run.recipe import Recipe, load_recipe, settings_of
from shoal.runtime.config import dump_config, parse_config

ROOT = Path(__file__).parents[3]

SETTINGS = """
run.name run.seed run.steps run.groups_per_step run.group_size run.max_staleness run.temperature run.max_new_tokens
run.proof_topk run.proof_rows
model.path
environment.name environment.file environment.options environment.train_size environment.held_out_size
environment.shuffle_rewards environment.data environment.mix environment.length environment.prompt environment.judges
environment.pools environment.scoring
trainer.learning_rate trainer.betas trainer.weight_decay trainer.warmup_steps trainer.grad_clip trainer.minibatches
trainer.advantage trainer.loss trainer.clip_epsilon trainer.clip_delta trainer.mask_truncated
trainer.micro_batch_tokens trainer.device trainer.threads trainer.publish_dtype trainer.anchor_every
trainer.checkpoint_every trainer.keep_checkpoints trainer.evaluate_every trainer.evaluate_by trainer.evaluate_tasks
trainer.batch_deadline_s trainer.keep_best trainer.lora trainer.processes trainer.tracking
hub.host hub.port hub.lease_s hub.audit_s hub.refill_cap hub.leases_per_node hub.max_submission_bytes
hub.max_inflated_bytes hub.concurrent_uploads hub.audit hub.credit_window_s hub.newcomer_share hub.lease_hard_s
hub.advertise hub.trusted_proxies hub.database hub.storage hub.storage_endpoint hub.requests_per_key_s
hub.requests_per_address_s hub.registrations_per_address_min hub.connections_per_address hub.drop_equal
validator.max_audits validator.audit_wait_s validator.held_versions validator.heartbeat_s
validator.hub_patience_s validator.policy_wait_s validator.count validator.engine
validator.profiles validator.device validator.dtype validator.memory_share validator.canary_every
worker.units_per_lease worker.lease_wait_s worker.heartbeat_s worker.hub_patience_s
worker.outbox_limit worker.stop_flush_s worker.count worker.engine
worker.device worker.dtype worker.memory_share
relay.kept_versions relay.connections relay.count
relay.disk_budget_gb relay.connections_per_client
"""

NESTED = """
environment.mix.name environment.mix.file environment.mix.data environment.mix.options environment.mix.train_size
environment.mix.held_out_size environment.mix.label environment.mix.weight
environment.length.targets environment.length.form environment.length.alpha environment.length.delta
environment.length.text environment.length.count_eos
environment.prompt.chat environment.prompt.system environment.prompt.thinking
environment.judges.label environment.judges.kind environment.judges.weight environment.judges.use
environment.judges.path environment.judges.url environment.judges.model environment.judges.prompt
environment.judges.timeout_s
environment.pools.retire_after environment.pools.easy environment.pools.hard environment.pools.easy_share
environment.pools.hard_share
environment.scoring.seconds environment.scoring.memory_mb environment.scoring.processes
trainer.lora.alpha trainer.lora.rank trainer.lora.targets
trainer.memory.compile trainer.memory.precision trainer.memory.recompute
trainer.objective.clip_high trainer.objective.entropy trainer.objective.kl trainer.objective.log_ratio_penalty
trainer.objective.mask_high trainer.objective.mask_low trainer.objective.move_limit trainer.objective.normalisation
trainer.objective.ratio_base trainer.objective.ratio_cap
trainer.guards.slow_factor
trainer.guards.not_finite.limit trainer.guards.not_finite.react
trainer.guards.gradient_spike.limit trainer.guards.gradient_spike.react
trainer.guards.gradient_slope.limit trainer.guards.gradient_slope.react
trainer.guards.entropy_rise.limit trainer.guards.entropy_rise.react
trainer.guards.clip_fraction.limit trainer.guards.clip_fraction.react
trainer.guards.effective_samples.limit trainer.guards.effective_samples.react
trainer.guards.mismatch_kl.limit trainer.guards.mismatch_kl.react
trainer.guards.divergence.limit trainer.guards.divergence.react
trainer.guards.truncation.limit trainer.guards.truncation.react
trainer.guards.no_signal.limit trainer.guards.no_signal.react
trainer.guards.staleness.limit trainer.guards.staleness.react
trainer.guards.reward_fall.limit trainer.guards.reward_fall.react
trainer.guards.reward_collapse.limit trainer.guards.reward_collapse.react
"""


def nested(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every field of a table that is absent unless a recipe has it: what `settings_of` a default recipe cannot see."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from nested(field.annotation, f"{prefix}{name}.")
        for table in tables(field.annotation):
            yield from (f"{prefix}{name}.{key}" for key in table.model_fields)
            yield from nested(table, f"{prefix}{name}.")


def tables(annotation: object) -> Iterator[type[BaseModel]]:
    """The tables in `Table | None` or `tuple[Table, ...]`."""
    for part in get_args(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield part
        else:
            yield from tables(part)


def in_sections() -> list[str]:
    return [name for name, _ in settings_of(Recipe()) if name.count(".") == 1]


def in_tables() -> list[str]:
    """Those of tables that every recipe has, and of those that are absent unless a recipe has them."""
    return [*(name for name, _ in settings_of(Recipe()) if name.count(".") > 1), *nested(Recipe)]


def test_the_settings_are_these_and_no_others() -> None:
    assert sorted(in_sections()) == sorted(SETTINGS.split())


def test_the_settings_in_tables_are_these_and_no_others() -> None:
    assert sorted(in_tables()) == sorted(NESTED.split())


def test_their_numbers_are_said_above() -> None:
    said = [int(number) for number in re.findall(r"\d+", __doc__ or "")]
    assert said == [len(SETTINGS.split()), len(NESTED.split())]


def test_there_are_about_a_hundred() -> None:
    assert len(SETTINGS.split()) <= 106


def test_defaults_survive_the_file() -> None:
    assert parse_config(dump_config(Recipe()), Recipe, "dump") == Recipe()


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_in_the_repository_loads_and_its_parts_exist(path: Path) -> None:
    from shoal.environments import build
    from shoal.models import model_folder

    recipe = load_recipe(path)
    assert recipe.run.name == path.stem
    build(recipe.environment)
    if recipe.model.path == "tiny":
        model_folder(recipe.model.path)


def test_paths_are_meant_from_where_the_recipe_lies(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[model]\npath = 'models/small'\n[environment]\nfile = 'reward.py'\n")
    recipe = load_recipe(path)
    assert recipe.model.path == str(tmp_path / "models" / "small")
    assert recipe.environment.file == tmp_path / "reward.py"
    assert load_recipe(path, ["model.path=/elsewhere"]).model.path == "/elsewhere"
    assert load_recipe(path, ["model.path=tiny"]).model.path == "tiny"


def test_a_run_publishes_in_bfloat16_where_its_workers_compute_so_unless_the_recipe_says_otherwise(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[worker]\ndtype = 'bfloat16'\n")
    assert load_recipe(path).trainer.publish_dtype == "bfloat16"
    assert load_recipe(path, ["trainer.publish_dtype=float32"]).trainer.publish_dtype == "float32"
    assert load_recipe(path, ["worker.dtype=auto"]).trainer.publish_dtype == "float32"


def test_profiles_are_meant_from_where_the_recipe_lies_or_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    path = tmp_path / "recipes" / "mine.toml"
    path.write_text("[validator]\nprofiles = ['a.toml', '/elsewhere/b.toml']\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe(path).validator.profiles == (tmp_path / "recipes" / "a.toml", Path("/elsewhere/b.toml"))
    given = load_recipe(path, ["validator.profiles=['c.toml', \"d.toml\"]"])
    assert given.validator.profiles == (tmp_path / "c.toml", tmp_path / "d.toml")
    assert load_recipe(path, ["validator.profiles=[]"]).validator.profiles == ()
    built_in = load_recipe(path, ["validator.profiles=['torch/cuda/bfloat16']"]).validator.profiles
    assert built_in == (Path("torch/cuda/bfloat16"),)
    assert parse_config(dump_config(given), Recipe, "dump") == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainer]\nlearning_rat = 1.0", r"\[trainer\] has no key 'learning_rat'; did you mean 'learning_rate'\?"),
        ("[worker]\ncounts = 2", r"\[worker\] has no key 'counts'; did you mean 'count'\?"),
        ("[trainer]\nclip_delta = 1.1", r"clip_delta \(1.1\) must be above 1 \+ clip_epsilon"),
        ("[run]\nname = 'a/b'", r"\[run\] name = \"a/b\": string should match pattern"),
        ("[run]\ntop_p = 0.9", r"top_p is not supported: truncated sampling biases the importance ratio"),
        ("[validator]\ndevize = 'cpu'", r"\[validator\] has no key 'devize'; did you mean 'device'\?"),
        ("[worker]\ndtype = 'int8'", r"\[worker\] dtype = \"int8\": input should be 'auto', 'float32' or 'bfloat16'"),
    ],
)
def test_mistakes_are_told_with_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


def test_a_path_in_an_override_is_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    recipe = tmp_path / "recipes" / "r.toml"
    recipe.write_text('[environment]\nfile = "beside.py"\n')
    monkeypatch.chdir(tmp_path)
    assert load_recipe(recipe).environment.file == tmp_path / "recipes" / "beside.py"
    for value in ("here.py", '"here.py"', "./here.py"):
        assert load_recipe(recipe, [f"environment.file={value}"]).environment.file == tmp_path / "here.py"
    assert load_recipe(recipe, ["model.path=tiny"]).model.path == "tiny"


def test_the_loss_of_demonstrations_is_none_of_a_run() -> None:
    for source, overrides in (('[trainer]\nloss = "cross_entropy"', ()), ("", ("trainer.loss=cross_entropy",))):
        with pytest.raises(ConfigError, match=r'\[trainer\]: loss = "cross_entropy" is for demonstrations.*shoal sft'):
            parse_config(source, Recipe, "r.toml", overrides)
