"""The configuration surface is pinned: a new setting is a decision, taken here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from pydantic import BaseModel

from shoal.errors import ConfigError
from shoal.run.recipe import Recipe, load_recipe
from shoal.runtime.config import dump_config, parse_config

ROOT = Path(__file__).parents[3]

SETTINGS = """
run: name seed steps groups_per_step group_size max_staleness temperature max_new_tokens
model: path
environment: name file data options train_size held_out_size mix length prompt judges pools scoring shuffle_rewards
environment.mix: name file data options train_size held_out_size label weight
environment.length: targets form alpha delta count_eos text
environment.prompt: chat system thinking
environment.judges: label weight use path url model prompt timeout_s
environment.pools: retire_after easy_share hard_share
environment.scoring: seconds memory_mb processes
trainer: learning_rate betas weight_decay warmup_steps grad_clip minibatches advantage loss clip_epsilon clip_delta
trainer: mask_truncated lora processes tracking micro_batch_tokens device threads publish_dtype checkpoint_every
trainer: keep_checkpoints keep_best evaluate_every evaluate_tasks batch_deadline_s
trainer.objective: normalisation ratio_base clip_high ratio_cap kl entropy
trainer.memory: precision recompute compile
trainer.guards.NAME: limit react
trainer.lora: rank alpha targets
hub: host port advertise trusted_proxies database storage storage_endpoint lease_s lease_hard_s audit_s audit
hub: credit_window_s newcomer_share refill_cap drop_equal leases_per_node requests_per_key_s requests_per_address_s
hub: connections_per_address
validator: max_audits keep_versions profiles device dtype memory_share count engine
worker: units_per_lease device dtype memory_share count engine
relay: count keep_versions disk_budget_gb
"""
MOST_SETTINGS = 130  # only goes down, unless a commit says why


def declared(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every setting that a recipe may have, also in tables that are absent unless it has them. A table that may be
    there several times, or under several names, counts once."""
    for name, field in model.model_fields.items():
        inner = list(tables(field.annotation))
        if inner != [field.annotation]:
            yield f"{prefix}{name}"
        for table in inner:
            yield from declared(table, f"{prefix}{name}.")
    if model.model_config.get("extra") == "allow":
        (table,) = tables(get_type_hints(model)["__pydantic_extra__"])
        yield from declared(table, f"{prefix}NAME.")


def tables(annotation: object) -> Iterator[type[BaseModel]]:
    """The tables in `Table`, `Table | None` or `tuple[Table, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        yield from (table for part in get_args(annotation) for table in tables(part))


def test_the_settings_are_these_and_no_others() -> None:
    rows = (line.split(": ") for line in SETTINGS.strip().splitlines())
    expected = sorted(f"{table}.{key}" for table, keys in rows for key in keys.split())
    assert sorted(declared(Recipe)) == expected
    assert len(expected) <= MOST_SETTINGS


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
