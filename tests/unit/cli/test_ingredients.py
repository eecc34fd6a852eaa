"""What cannot work is said before anything is made or started, in one line, with exit code 2."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kit import Patch
from shoal.environments import EnvironmentSettings, build
from shoal.errors import ConfigError, ModelError, UserError
from shoal.models import model_folder
from shoal.models.folder import check_targets
from shoal.run.preflight import check_engines, check_ingredients, check_machine
from shoal.run.recipe import Recipe, load_recipe, missing_inputs
from shoal.runtime.config import dump_config, parse_config

SCORE_TWO = "tasks = [('1=', '1'), ('2=', '2')]\ndef score(task, completion):\n    return "
SCORE = "\ndef score(prompt, completion, answer):\n    return 1.0\n"


def reward_file(folder: Path, source: str) -> Recipe:
    file = folder / "reward.py"
    file.write_text(source)
    return Recipe.model_validate({"environment": {"file": str(file)}}, strict=False)


@pytest.mark.parametrize(("source", "sentence"), [
    ("tasks = [('', '1'), ('1=', '1')]" + SCORE, "has no tokens"),
    ("tasks = [('héllo', '1'), ('1=', '1')]" + SCORE, "does not know"),
    ("tasks = [('1' * 100000, '1'), ('1=', '1')]" + SCORE, "room for"), (SCORE_TWO + "task['answer']", "TypeError"),
    (SCORE_TWO + "__import__('sys').exit(7)", "SystemExit"), ("import sys\nsys.exit(7)" + SCORE, "does not load"),
    (SCORE_TWO + "{'value': 1, 'parts': {'task': 1.0}}", "call 'task' something else"),
])  # fmt: skip
def test_an_environment_that_cannot_work(tmp_path: Path, source: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as refusal:
        check_ingredients(reward_file(tmp_path, source))
    assert "\n" not in str(refusal.value)


def test_a_colon_in_an_id_makes_no_mixture(tmp_path: Path) -> None:
    """One task of each kind is tried: ids must not use up the tries before the last kind has come."""
    from shoal.run.preflight import _check_tasks

    rows = [{"id": f"src{n}:{n}", "question": f"{n}+1=", "answer": str(n + 1)} for n in range(60)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(_check_tasks(build(EnvironmentSettings(name="dataset", data=path)), None)) == 1
    parts = [{"name": "dataset", "data": str(path), "label": label} for label in ("a", "b")]
    assert len(_check_tasks(build(EnvironmentSettings.model_validate({"mix": parts})), None)) == 2


@pytest.mark.parametrize(("judge", "sentence"), [
    ({"url": "http://host:port/v1", "model": "m"}, "is no address"),
    ({"url": "http://judge.test/v1", "model": "m"}, "SHOAL_JUDGE_KEY"), ({"path": "/nowhere"}, "is no folder"),
])  # fmt: skip
def test_a_judge_that_could_never_judge(judge: dict[str, str], sentence: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("SHOAL_JUDGE_KEY", "schlüssel")
    recipe = Recipe.model_validate({"environment": {"judges": [{"label": "taste", **judge}]}})
    with pytest.raises(UserError, match=sentence):
        check_ingredients(recipe)


def with_model(folder: Path) -> Recipe:
    return Recipe.model_validate({"model": {"path": str(folder)}})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(model_folder("tiny"), tmp_path / "model"))


def packed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _whole: b"", "header too small"),
    "cut in the length": (lambda whole: whole[:5], "header too small"),
    "cut in the header": (lambda whole: whole[:40], "invalid header length"),
    "cut in the weights": (lambda whole: whole[:-1], "file not fully covered"),
    "too long": (lambda whole: whole + b"0", "file not fully covered"),
    "a pointer of git-lfs": (lambda _whole: b"version https://git-lfs.github.com/spec/v1\n", "header too large"),
    "no JSON": (lambda _whole: packed(b"{nonsense"), "header"),
    "no table": (lambda _whole: packed([1, 2]), "header"),
    "a tensor without a place": (lambda _whole: packed({"a": {"dtype": "F32"}}), "header"),
    "a tensor backwards": (
        lambda _whole: packed({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}),
        "header",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights(model: Path, damage: str) -> None:
    change, sentence = DAMAGE[damage]
    file = model / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError, match=sentence) as refusal:
        check_ingredients(with_model(model))
    assert str(file) in str(refusal.value)
    assert "download it again" in str(refusal.value)


def test_one_file_of_several_that_is_missing(model: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"names model-00001-of-00002\.safetensors, which is not there"):
        check_ingredients(with_model(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file"):
        check_ingredients(with_model(model))
    (model / "model.safetensors").touch()
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="is no list of weight files"):
        check_ingredients(with_model(model))


@pytest.mark.parametrize(("changes", "words"), [
    ({"vocab_size": 5}, r"knows \d+ tokens, but the model has embeddings for 5: use the tokenizer that"),
    ({"eos_token_id": 10**6}, "is 1000000, beyond the"),
])  # fmt: skip
def test_tokens_that_the_model_has_not(model: Path, changes: dict[str, int], words: str) -> None:
    for name in ("config.json", "generation_config.json"):
        (model / name).write_text(json.dumps({**json.loads((model / name).read_text()), **changes}))
    with pytest.raises(ModelError, match=words):
        check_ingredients(with_model(model))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"worker": {"engine": "scripted", "dtype": "bfloat16"}}, r"\[worker\] the engine scripted does not"),
        ({"worker": {"engine": "scripted"}, "validator": {"dtype": "bfloat16"}}, r"\[validator\] the engine scripted"),
        ({"worker": {"dtype": "bfloat16"}},
            r"no validator of this recipe can judge that: .* bfloat16 needs trainer\.publish_dtype"),
        ({"validator": {"profiles": ["nowhere.toml"]}}, r"cannot read the profile .*nowhere\.toml"),
        ({"hub": {"trusted_proxies": ["my-proxy"]}}, "hub.trusted_proxies: 'my-proxy' "),
        ({"worker": {"engine": "torhc"}}, r"^\[worker\] there is no engine 'torhc'; there are scripted, torch, vllm"),
    ],
    ids=["worker-dtype", "validator-dtype", "not-published", "no-profile-file", "proxy", "no-engine"],
)  # fmt: skip
def test_kinds_that_no_validator_judges_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_ingredients(Recipe.model_validate(changes, strict=False))


@pytest.mark.parametrize("changes", [
    {"worker": {"dtype": "bfloat16"}, "validator": {"profiles": ["torch/cpu/bfloat16"]}},
    {"worker": {"dtype": "bfloat16", "count": 0}},
    {"worker": {"dtype": "bfloat16"}, "trainer": {"publish_dtype": "bfloat16"}},
    {"worker": {"device": "cpu"}, "validator": {"dtype": "bfloat16"}},
    {"worker": {"engine": "scripted"}},
], ids=["named", "no-workers", "measured", "coarse-validator", "scripted"])  # fmt: skip
def test_kinds_that_a_validator_judges_pass(changes: dict[str, object]) -> None:
    check_engines(Recipe.model_validate(changes, strict=False))


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"worker": {"device": "cuda"}, "trainer": {"device": "cuda"}})
    with pytest.raises(UserError, match=r'trainer.device and worker.device is "cuda", but this machine has no GPU'):
        check_machine(recipe, tmp_path)
    (tmp_path / "nvidiactl").touch()
    check_machine(recipe, tmp_path)
    elsewhere = {"device": "cuda", "count": 0}
    check_machine(Recipe.model_validate({"worker": elsewhere, "validator": elsewhere}), tmp_path / "empty")


LAYERS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


def with_adapters(*targets: str, path: str = "tiny") -> Recipe:
    return Recipe.model_validate({"model": {"path": path}, "trainer": {"lora": {"targets": list(targets)}}})


@pytest.mark.parametrize("target", ["qproj", "lm_head", "embed_tokens", "q_norm", "self_attn"])
def test_adapters_on_layers_that_the_model_has_not(target: str) -> None:
    with pytest.raises(ModelError, match=rf"adapter is called '{target}'; there are: {LAYERS}$"):
        check_ingredients(with_adapters("q_proj", target))


def test_adapters_on_layers_of_several_files(model: Path) -> None:
    """A layer may be in any of them, and its head may have as many rows as there are tokens."""

    values = np.zeros((96, 8), np.float32)
    save_file({"model.layers.3.mlp.router.weight": values}, model / "b.safetensors")
    save_file({"model.other.weight": values}, model / "c.safetensors", metadata={"a": "b"})
    check_targets(model, ["router", "q_proj"])
    with pytest.raises(ModelError, match="'other'"):
        check_targets(model, ["other"])


EVERYTHING = """
[model]
path = "models/small"

[environment]
train_size = 500
held_out_size = 16
data = "rows"
options = {held_out = "other.jsonl", columns = {question = "q"}, list = [1, 2.5, "x", true, [{deep = "er"}]]}

[[environment.mix]]
name = "dataset"
label = "maths"
weight = 2.5
data = "maths.jsonl"
[environment.mix.options]
held_out = "aime.jsonl"

[[environment.mix]]
file = "reward.py"

[[environment.mix]]
name = "reasoning-gym"
options = {mix = [{generator = "chain_sum", weight = 2.0, settings = {max_terms = 2}}, {generator = "lcm"}]}

[environment.length]
targets = [8, 16]
form = "max"

[environment.prompt]
chat = false
thinking = "<think>\\n"

[[environment.judges]]
label = "taste"
path = "judge"

[[environment.judges]]
label = "word"
url = "http://127.0.0.1:1/v1"
model = "m"

[environment.scoring]
seconds = 2.5
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "recipe.toml"
    path.parent.mkdir()
    path.write_text(EVERYTHING)
    return path


def test_recipe_is_written_back_the_same_and_its_paths_are_relative_to_it(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert parse_config(dump_config(loaded), Recipe, "again") == loaded
    assert loaded.environment.options["list"] == [1, 2.5, "x", True, [{"deep": "er"}]]
    assert loaded.environment.length.targets == (8, 16)
    loaded, base = load_recipe(recipe), recipe.parent
    assert loaded.model.path == str(base / "models" / "small")
    assert load_recipe(recipe, ["model.path=tiny"]).model.path == "tiny"
    assert [judge.path for judge in loaded.environment.judges] == [base / "judge", None]
    names = ["models/small", "judge", "rows", "other.jsonl", "maths.jsonl", "aime.jsonl", "reward.py"]
    assert sorted(missing_inputs(loaded)) == sorted(str(base / name) for name in names)
    (base / "rows").mkdir()
    assert str(base / "rows") not in missing_inputs(loaded)


def test_overrides_reach_into_tables_and_are_meant_from_here(recipe: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    changed = load_recipe(recipe, [
        "environment.mix.0.weight=9", "environment.mix.0.data=mine.jsonl", "environment.options.held_out=aside.jsonl",
        "environment.mix.2.options.mix.1.generator=gcd", "environment.judges.0.path=other_judge",
        "environment.length.targets=[4]", "environment.options.depth.of.nesting=3",
    ]).environment  # fmt: skip
    assert changed.mix[0].weight == 9.0
    assert changed.mix[0].data == tmp_path / "mine.jsonl"
    assert changed.options["held_out"] == str(tmp_path / "aside.jsonl")
    assert changed.mix[2].options["mix"][1] == {"generator": "gcd"}
    assert changed.judges[0].path == tmp_path / "other_judge"
    assert changed.length.targets == (4,)
    assert changed.options["depth"] == {"of": {"nesting": 3}}


@pytest.mark.parametrize(("override", "sentence"), [
    ("environment.mix.7.weight=1", "give a number from 0 to 2 in place of 7"),
    ("environment.mix.first.weight=1", "give a number from 0 to 2 in place of first"),
    ("environment.mix.0=1", "would be a whole table"),
    ("environment.length.targets.0=1", "targets is a value, not a section"),
    ("environment.length.from=max", r"\[environment.length\] has no key 'from'"),
])  # fmt: skip
def test_overrides_that_go_nowhere(recipe: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_recipe(recipe, [override])
