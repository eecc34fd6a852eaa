"""The configuration surface is pinned: a new setting is a decision, taken here."""

import re
import tomllib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from pydantic import BaseModel

from kit import Patch
from kit.sandbox import needs_bubblewrap
from shoal.environments import build
from shoal.errors import ConfigError
from shoal.run.preflight import check_ingredients
from shoal.run.recipe import Recipe, load_recipe
from shoal.runtime.config import dump_config, parse_config

ROOT = Path(__file__).parents[3]

SETTINGS = """
run: name seed steps groups_per_step group_size max_staleness temperature max_new_tokens stop
model: path
environment: name file data options train_size held_out_size mix length prompt judges
environment: scoring shuffle_rewards retire_after
environment.mix: name file data options train_size held_out_size label weight
environment.length: targets form alpha count_eos text
environment.prompt: chat system thinking
environment.judges: label weight use path url model prompt
environment.scoring: seconds memory_mb processes
trainer: learning_rate betas weight_decay warmup_steps grad_clip minibatches advantage loss clip_epsilon clip_delta
trainer: mask_truncated lora processes tracking micro_batch_tokens device threads publish_dtype checkpoint_every
trainer: keep_checkpoints keep_best evaluate_every evaluate_tasks batch_deadline_s
trainer.objective: normalisation ratio_base clip_high ratio_cap kl entropy
trainer.memory: precision recompute compile
trainer.guards.NAME: limit action
trainer.lora: rank alpha targets
hub: host port advertise trusted_proxies database storage storage_endpoint link_mbit lease_s lease_hard_s audit
hub: newcomer_share trusted_audit refill_cap drop_equal records_gb leases_per_node
hub: requests_per_key_s requests_per_address_s
validator: max_audits keep_versions profiles device dtype memory_share count
worker: units_per_lease device dtype memory_share count engine
relay: count
dashboard: public
"""
MOST_SETTINGS = 121  # stop strings, trusted workers, records, pages; only goes down, unless a commit says why


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


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_in_the_repository_loads_and_its_parts_exist(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.run.name == path.stem
    build(recipe.environment)


def test_bfloat16_is_published_where_workers_compute_so_unless_set(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[worker]\ndtype = 'bfloat16'\n")
    assert load_recipe(path).trainer.publish_dtype == "bfloat16"
    assert load_recipe(path, ["trainer.publish_dtype=float32"]).trainer.publish_dtype == "float32"
    assert load_recipe(path, ["worker.dtype=auto"]).trainer.publish_dtype == "float32"


def test_profiles_are_meant_from_where_the_recipe_lies_or_from_here(tmp_path: Path, monkeypatch: Patch) -> None:
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


def test_paths_inside_a_table_of_an_override_are_meant_from_here(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "recipes").mkdir()
    path, judge = tmp_path / "recipes" / "mine.toml", "{label = 'a', path = 'a'}"
    path.write_text(f"[environment]\njudges = [{judge}]\n")
    monkeypatch.chdir(tmp_path)
    for overrides, place in (
        ([], "recipes/a"), ([f"environment.judges=[{judge}]"], "a"), (["environment.judges.0.path=b"], "b"),
        (["environment.judges.0.weight=2.0"], "recipes/a"),
    ):  # fmt: skip
        assert load_recipe(path, overrides).environment.judges[0].path == tmp_path / place, overrides


def test_a_shipped_recipe_looks_here_for_what_it_does_not_bring(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(Path("gym")).model.path == str(tmp_path / "runs" / "gym-start")
    recipe = load_recipe(Path("intellect2"))
    assert recipe.model.path == str(tmp_path / "models" / "QwQ-32B")
    assert recipe.environment.data == ROOT / "recipes" / "data" / "described.jsonl"


@pytest.mark.parametrize(("text", "message"), [
    ("[trainer]\nclip_delta = 1.1", r"clip_delta \(1.1\) must be above 1 \+ clip_epsilon"),
    ("[run]\nname = 'a/b'", r"\[run\] name = \"a/b\": string should match pattern"),
    ("[run]\nstop = ['']", r"a stop string has 1 to 64 characters, none of them U\+FFFD; '' has 0"),
    ("[run]\ntop_p = 0.9", r"top_p is not supported: truncated sampling biases the importance ratio"),
    ('[trainer]\nloss = "cross_entropy"', r'\[trainer\]: loss = "cross_entropy" is for demonstrations.*shoal sft'),
    ("[worker]\ndtype = 'int8'", r"\[worker\] dtype = \"int8\": input should be 'auto', 'float32' or 'bfloat16'"),
])  # fmt: skip
def test_mistakes_are_told_with_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


PATH = ROOT / "recipes" / "intellect2.toml"
TWIN = ROOT / "recipes" / "intellect2-tiny.toml"
PAGE = ROOT / "docs" / "concepts" / "intellect2.md"

DESCRIBED = tomllib.loads("""
run = {groups_per_step = 256, group_size = 16, max_staleness = 2, temperature = 0.6, max_new_tokens = 16000}
hub = {drop_equal = "total"}
environment.options = {keep_solve_rate = [0.125, 0.5]}
environment.prompt = {thinking = "<think>\\n"}
[environment.length]
form = "exact"
alpha = 0.0003
count_eos = true
targets = [2000, 4000, 6000, 8000, 10000]
text = "Think for {target} tokens before giving a response."
[trainer]
learning_rate = 3e-7
betas = [0.9, 0.99]
weight_decay = 0.01
warmup_steps = 25
grad_clip = 0.1
minibatches = 8
advantage = "group_mean_sample_std"
loss = "two_sided_clip"
clip_epsilon = 0.2
clip_delta = 4.0
mask_truncated = false
micro_batch_tokens = 32768
objective = {kl = 0.001, entropy = 1e-4, normalisation = "tokens", ratio_base = "recomputed"}
memory = {precision = "bfloat16", recompute = true, compile = false}
""")


def within(described: object, found: object) -> bool:
    """Whether everything that is described is found so."""
    if not isinstance(described, dict):
        return described == found
    return isinstance(found, dict) and all(within(value, found.get(name)) for name, value in described.items())


def test_described_recipe_has_its_numbers_its_page_existing_files_and_its_twin_the_same_mechanisms() -> None:
    assert within(DESCRIBED, tomllib.loads(PATH.read_text())), "not left to defaults"
    assert load_recipe(PATH).trainer.objective.clip_high is None
    # docs/concepts/intellect2.md: where each mechanism is
    named = re.findall(r"`([a-z_]+(?:/[a-z_0-9.]+)+)`", PAGE.read_text())
    assert len(named) > 80
    assert [path for path in named if not (ROOT / "src" / "shoal" / path).exists() and path != "src/shoal"] == []
    described, twin = load_recipe(PATH), load_recipe(TWIN)
    for table, names in {
        "trainer": "advantage loss minibatches warmup_steps clip_epsilon clip_delta mask_truncated objective",
        "environment.length": "form count_eos", "hub": "drop_equal", "run": "max_staleness",
    }.items():  # fmt: skip
        for name in names.split():
            path = f"{table}.{name}"
            assert attrgetter(path)(twin) == attrgetter(path)(described), path


@needs_bubblewrap
def test_all_but_the_model_fits_together() -> None:
    """What the file says to try: the tiny model in place of the large one, and lengths that it has room for."""
    small = ["model.path=tiny", "run.max_new_tokens=64", "environment.length.targets=[16,32]"]
    assert all(setting in PATH.read_text() for setting in small)
    environment = check_ingredients(load_recipe(PATH, small))
    # 28 rows, of which one is solved always and one never; a fifth is held out
    assert len(environment.tasks("train")) + len(environment.tasks("held_out")) == 26
