"""The owner's own code: how it is named, recorded with the run and refused when it has changed; the guides' code."""

import hashlib
import re
import sys
from pathlib import Path

import pytest
import torch

from kit.data import own_cache as own_cache
from shoal.algorithms.advantages import OwnAdvantage, RolloutGroup
from shoal.algorithms.losses import LossParameters, LossTokens
from shoal.algorithms.registry import advantage_named, loss_named, try_own
from shoal.environments import EnvironmentSettings, build, columns_of
from shoal.environments.formats import DatasetOptions
from shoal.errors import ConfigError, EnvironmentSetupError
from shoal.run.preflight import check_ingredients
from shoal.run.recipe import load_recipe, missing_inputs, refuse_other_recipe
from shoal.runtime.extensions import check_word, pinned, resolve
from shoal.trainer.record import Tracked, open_trackers
from shoal.trainer.settings import OWN_CODE, TrainerSettings

GUIDES = Path(__file__).parents[3] / "docs/guides"
TINY = Path(__file__).parents[3] / "recipes/tiny.toml"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The examples of the three guides in one file."""
    pages = [(GUIDES / name).read_text() for name in ("train.md", "environments.md", "tracking.md")]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    assert len(blocks) == 3
    (tmp_path / "mine.py").write_text("\n".join(blocks))
    return tmp_path / "mine.py"


@pytest.fixture
def package(tmp_path: Path, monkeypatch):
    """Installs a distribution with the entry point `my_loss`, again for another version."""

    def install(version: str) -> None:
        site = tmp_path / "site"
        info = site / "my_package.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: my-package\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[shoal.losses]\nmy_loss = my_losses:loss\nbroken = nowhere:loss\n")
        (site / "my_losses.py").write_text("def loss(tokens, parameters): return tokens.logprobs_N * 0\n")
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(site)

    return install


TOKENS = LossTokens(torch.tensor([-0.5, -1.0]), torch.tensor([-0.5, -2.0]), torch.tensor([1.0, -1.0]))


def group(**columns: object) -> RolloutGroup:
    return RolloutGroup(
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64), lengths=torch.tensor([4, 2]), tokens=[], logprobs=[],
        drawn=[], finishes=["eos", "eos"], prompt=torch.tensor([1]).numpy(), task="t", columns=columns,
    )  # fmt: skip


def test_loss_and_advantage_of_the_guide_by_hand(mine):
    output = loss_named(f"{mine}:loss")(TOKENS, LossParameters(epsilon=0.2))
    assert output.loss_N.tolist() == pytest.approx([-1.0, 1.2])
    advantage = advantage_named(f"{mine}:advantage")
    assert isinstance(advantage, OwnAdvantage)
    assert advantage.of(group()) == pytest.approx([0.475, -0.475])
    try_own(f"{mine}:advantage", f"{mine}:loss", {})
    try_own("group_mean", "two_sided_clip", {})


@pytest.mark.parametrize(("code", "said"), [
    ("def loss(tokens, parameters): return 1 / 0", r"trainer.loss: .*mine.py:loss on 4 tokens: ZeroDivisionError"),
    ("def loss(tokens, parameters): return tokens.logprobs_N.sum()", "not a tensor with one number for each token"),
    ("def loss(tokens, parameters): return None", "not a tensor with one number"),
    ("def loss(tokens): ...", "TypeError"), ("los = 3", r"mine.py defines no loss \(did you mean 'los'\?\)"),
    ("loss = 3", "no function or class, but int"), ("def loss(", "does not load: SyntaxError"),
    ("def loss(tokens, parameters): return tokens.behaviour_N * 1.0", "on four tokens: RuntimeError: .*grad"),
])  # fmt: skip
def test_a_loss_that_does_not_work_is_refused_before_the_run(tmp_path, code, said):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=said):
        try_own("group_mean", f"{tmp_path}/mine.py:loss", {})


@pytest.mark.parametrize(("result", "said"), [
    ("[1.0]", "not one finite number for each of 2"), ("[1.0, float('nan')]", "not one finite number"),
    ("group.rewards * group.columns['weight']", "KeyError: 'weight'"), ("'good'", "TypeError|ValueError"),
])  # fmt: skip
def test_an_advantage_that_does_not_work_is_refused_before_the_run(tmp_path, result, said):
    (tmp_path / "mine.py").write_text(f"def adv(group): return {result}")
    with pytest.raises(ConfigError, match=f"trainer.advantage: .*(?:{said})"):
        try_own(f"{tmp_path}/mine.py:adv", "two_sided_clip", {})


def test_a_recipe_records_files_and_refuses_changed_ones(mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    names = ["trainer.loss=mine.py:loss", "environment.name=mine.py:Doubles", 'trainer.tracking=["mine.py:Lines"]']
    recipe = load_recipe(TINY, names)
    pin = f"#sha256={hashlib.sha256(mine.read_bytes()).hexdigest()}"
    assert recipe.trainer.loss == f"{mine}:loss{pin}"
    assert (recipe.environment.name, recipe.trainer.tracking) == (f"{mine}:Doubles{pin}", (f"{mine}:Lines{pin}",))
    assert build(recipe.environment).name == "doubles"
    assert missing_inputs(recipe) == []
    mine.write_text(mine.read_text() + "\n# another version\n")
    changed = r"mine\.py has changed since the run began .*put the file back, or start a new run"
    with pytest.raises(ConfigError, match=f"trainer.loss: .*{changed}"):
        loss_named(recipe.trainer.loss)
    with pytest.raises(ConfigError, match=f"environment.name: .*{changed}"):
        build(recipe.environment)
    with pytest.raises(ConfigError, match="was made with another recipe"):
        refuse_other_recipe(mine.parent, recipe, load_recipe(TINY, names))
    mine.unlink()
    assert missing_inputs(recipe) == [str(mine)] * 3
    with pytest.raises(ConfigError, match=r"trainer.loss: cannot read .*mine.py: No such file"):
        load_recipe(TINY, names)


def test_an_entry_point_is_recorded_with_its_package_and_version(package):
    package("1.2")
    assert check_word("loss", "my_loss", ("plain",)) == "my_loss"
    value = pinned("trainer.loss", "loss", "my_loss")
    assert value == "my_loss#my-package==1.2"
    assert TrainerSettings(loss=value).loss == value
    assert loss_named(value)(TOKENS, LossParameters()).loss_N.tolist() == [0.0, 0.0]
    package("1.3")
    with pytest.raises(ConfigError, match=r"my_loss has changed .*was my-package==1.2, is my-package==1.3.*install"):
        resolve("trainer.loss", "loss", value)
    with pytest.raises(ConfigError, match="the entry point broken does not load: ModuleNotFoundError"):
        resolve("trainer.loss", "loss", "broken")


@pytest.mark.parametrize(("field", "value", "said"), [
    ("loss", "ppo_clop", r"there is no loss 'ppo_clop' \(did you mean 'ppo_clip'\?\); .*shoal.losses"),
    ("advantage", "mine.py", "there is no advantage 'mine.py'.* FILE.py:NAME"),
    ("tracking", ("wandbb",), r"there is no tracker 'wandbb' \(did you mean 'wandb'"),
])  # fmt: skip
def test_a_word_that_names_nothing_is_refused(field, value, said):
    with pytest.raises(ValueError, match=said):
        TrainerSettings.model_validate({field: value})


def test_words_of_shoal_are_never_looked_for_elsewhere():
    for kind, known in OWN_CODE.values():
        assert all(check_word(kind, word, known) == pinned("x", kind, word) == word for word in known)


def test_environment_of_the_guide_and_what_is_none(mine):
    made = build(EnvironmentSettings(name=f"{mine}:Doubles", options={"largest": 50}))
    assert [made.score(made.task("20"), text).value for text in ("40", "41")] == [1.0, 0.0]
    for name, said in ((":Lenient", "has not all of name, digest"), (":Nothing", "defines no Nothing")):
        with pytest.raises((ConfigError, EnvironmentSetupError), match=said):
            build(EnvironmentSettings(name=f"{mine}{name}"))
    with pytest.raises(EnvironmentSetupError, match="Doubles raised TypeError"):
        build(EnvironmentSettings(name=f"{mine}:Doubles", options={"size": 3}))


def test_grader_of_the_guide_scores_rows_and_no_row_names_one(mine, tmp_path, own_cache):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "Sky?", "answer": "Blue"}\n{"question": "Grass?", "answer": "green"}\n')
    settings = EnvironmentSettings(name="dataset", data=data, options={"grader": f"{mine}:Lenient"}, held_out_size=1)
    made = build(settings)
    task = next(task for split in ("train", "held_out") for task in made.tasks(split) if task.answer == "Blue")
    assert [made.score(task, text).value for text in ("It is blue.", "red")] == [1.0, 0.0]
    assert columns_of(made, task.id) == {"answer": "Blue"}
    data.write_text(f'{{"prompt": "Sky?", "verification_info": "{{}}", "task_type": "{mine}:Lenient"}}\n')
    with pytest.raises(EnvironmentSetupError, match="no grader judges it"):
        build(EnvironmentSettings(name="dataset", data=data))
    assert DatasetOptions().grader == ""


def test_tracker_of_the_guide_writes_rows_and_one_that_fails_is_left_out(mine, caplog):
    broken = mine.with_name("broken.py")
    broken.write_text("def Tracker(tracked): raise OSError('no disk')\n")
    trackers = open_trackers([f"{mine}:Lines", f"{broken}:Tracker"], Tracked(mine.parent, "run"))
    trackers.begin([{"step": 0, "reward_mean": 0.5}])
    trackers.write({"step": 1, "reward_mean": 0.75})
    assert (mine.parent / "lines.txt").read_text() == "0 0.5\n1 0.75\n"
    assert "broken.py:Tracker is left out: OSError: no disk" in caplog.text


def test_checks_before_a_run_call_the_owners_functions_with_columns_of_a_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(
        "tasks = [{'prompt': f'{n}=', 'weight': n} for n in range(9)]\ndef f(completions, **k): return [1]\n"
        "def adv(group): return group.rewards * group.columns['weight']\n"
        "def other(group): return group.rewards * group.columns['height']\n"
    )
    names = ["environment.file=reward.py", "trainer.advantage=reward.py:adv"]
    check_ingredients(load_recipe(TINY, names))
    with pytest.raises(ConfigError, match="KeyError: 'height'"):
        check_ingredients(load_recipe(TINY, [names[0], "trainer.advantage=reward.py:other"]))
