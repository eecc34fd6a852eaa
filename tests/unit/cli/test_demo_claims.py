"""The demo's claims: each is shown a run in which it holds, and runs in which it does not."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kit import Patch, TempPaths
from shoal.adversary import CHEATS
from shoal.engines.dialogue import greedy_answers
from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings, build
from shoal.errors import ConfigError, DeadlineExceeded, ModelError, ResourceError, ShoalError
from shoal.ledger import append, fold
from shoal.models.load import load_model
from shoal.protocol import LedgerEntry, SamplingParameters
from shoal.run.demo import claims
from shoal.run.demo import recount as module
from shoal.run.demo.claims import MARK, Claim, Participants, learned, model_scores_as_claimed, replace_earlier_demo
from shoal.run.demo.recount import Recount, recount, score
from shoal.run.recipe import Recipe
from shoal.runtime import FolderLock, StopToken
from shoal.trainer.export import ModelCard, export_policy
from shoal.trainer.folder import TrainerProgress

CAST = Participants(
    honest={"worker-0": "aa", "worker-1": "bb"}, cheater="cc", cheater_name="worker-2", cheat=CHEATS["best-of"]
)
START_MS = 1_000_000


def ledger(*rows: tuple[str, dict[str, Any]]) -> list[LedgerEntry]:
    """A chain of these rows, one second apart."""
    entries: list[LedgerEntry] = []
    for second, (kind, body) in enumerate([("run", {"run": "demo"}), *rows]):
        entries.append(append(entries[-1] if entries else None, kind, body, START_MS + 1000 * second))
    return entries


def credit(node: str, unit: int) -> tuple[str, dict[str, Any]]:
    return "credit", {"node": node, "unit": unit, "submission": f"{node}{unit}", "tokens": 10, "credit": 10}


def rejected(node: str, unit: int) -> tuple[str, dict[str, Any]]:
    return "rejected", {"node": node, "unit": unit, "submission": f"{node}{unit}", "reason": "sampling.seed"}


def banned(node: str, reason: str) -> tuple[str, dict[str, Any]]:
    return "sanction", {"node": node, "state": "banned", "reason": reason}


def batch(*units: int) -> tuple[str, dict[str, Any]]:
    return "batch", {"step": 0, "units": list(units)}


def cheater_caught(*rows: tuple[str, dict[str, Any]]) -> Claim:
    """As the hub's rows would have it."""
    entries = ledger(*rows)
    shut_out_at_ms = {entry.body["node"]: entry.at_ms for entry in entries if entry.kind == "sanction"}
    return claims.cheater_caught(entries, fold(entries).by_node, shut_out_at_ms.get(CAST.cheater, 0), CAST)


def honest_unpunished(*rows: tuple[str, dict[str, Any]]) -> Claim:
    return claims.honest_unpunished(fold(ledger(*rows)).by_node, CAST)


CAUGHT = (credit("aa", 1), credit("bb", 2), rejected("cc", 3), banned("cc", "sampling.seed: other dice"), batch(1, 2))
SUSPENDED = {"node": "cc", "state": "suspended", "reason": "sampling.seed: 2 of 127 tokens", "until_ms": 1_060_000}
PASSED = (credit("cc", 5), credit("cc", 6), batch(4, 5), rejected("cc", 7), banned("cc", "sampling.seed: x"))


@pytest.mark.parametrize(("claim", "holds", "words"), [
    (learned([0.3, 0.4, 0.5]), True, "+20.0 points"),
    (learned([0.3, 0.49]), False, "at least +20 were expected"),
    (learned([0.3, 0.9, 0.4]), False, "0.300 → 0.400"),  # the last score counts, not the best
    (learned([]), False, "was measured 0 times"),
    (learned([0.9]), False, "was measured 1 times"),
    (cheater_caught(*CAUGHT), True, "banned 4 s after the hub began, for sampling.seed: other dice; 1 rejected"),
    (cheater_caught(rejected("cc", 3), ("sanction", SUSPENDED)), True, "suspended 2 s after the hub began, for"),
    (cheater_caught(*PASSED), True, "2 accepted, being what honest seeds give as well (1 of them trained on)"),
    (cheater_caught(credit("aa", 1), credit("bb", 2)), False, "not caught"),
    (cheater_caught(rejected("cc", 3)), False, "not caught"),
    (cheater_caught(banned("aa", "sampling.seed: x")), False, "not caught"),
    (cheater_caught(rejected("cc", 3), banned("cc", "envelope.malformed: x")), False, "not for"),
    (honest_unpunished(*CAUGHT), True, "2 groups accepted, 0 rejected, credit 20"),
    (honest_unpunished(*CAUGHT, rejected("aa", 9)), False, "punished without cause"),
    (honest_unpunished(*CAUGHT, banned("bb", "sampling.seed: x")), False, "punished without cause"),
    (honest_unpunished(credit("aa", 1)), False, "worker-1"),
    (model_scores_as_claimed(0.75, Recount(score=0.75, tasks=256)), True, "as claimed"),
    (model_scores_as_claimed(0.75, Recount(score=0.75 - 1 / 256, tasks=256)), True, "as claimed"),
    (model_scores_as_claimed(0.75, Recount(score=0.75 - 2 / 256, tasks=256)), False, "the trainer claimed 0.750"),
    (model_scores_as_claimed(None, Recount(score=0.75, tasks=256)), False, "the trainer made no claim"),
])  # fmt: skip
def test_a_claim_holds_or_fails_the_demo(claim: Claim, holds: bool, words: str) -> None:
    assert (claim.holds, words in claim.sentence) == (holds, True), claim


FACTS: dict[str, object] = {"seed": 3}


def earlier_demo(path: Path) -> Path:
    replace_earlier_demo(path, FACTS)
    (path / "hub").mkdir()
    (path / "hub" / "hub.db").write_text("old")
    return path


def test_only_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    path = earlier_demo(tmp_path / "demo")
    replace_earlier_demo(path, FACTS)
    assert [entry.name for entry in path.iterdir()] == [MARK]
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(earlier_demo(tmp_path / "real"))
    (tmp_path / "file").write_text("x")
    there = sorted(tmp_path.rglob("*"))
    for name, words in (("work", "not an earlier demo's; give"), ("link", "is not a folder"), ("file", "is not a f")):
        with pytest.raises(ConfigError, match=words):
            replace_earlier_demo(tmp_path / name, FACTS)
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize("busy", [".", "hub"])
def test_a_demo_that_is_running_or_still_ending_is_not_replaced(tmp_path: Path, monkeypatch: Patch, busy: str) -> None:
    monkeypatch.setattr(claims, "LOCK_WAIT_S", 0.0)
    path = earlier_demo(tmp_path / "demo")
    with FolderLock(path / busy).acquire(StopToken()), pytest.raises(ResourceError, match="in use by process"):
        replace_earlier_demo(path, FACTS)
    assert (path / "hub" / "hub.db").exists()
    replace_earlier_demo(path, FACTS)


def test_the_folder_that_one_is_in_is_not_replaced(tmp_path: Path, monkeypatch: Patch) -> None:
    path = earlier_demo(tmp_path / "demo")
    monkeypatch.chdir(path / "hub")
    with pytest.raises(ConfigError, match="from within"):
        replace_earlier_demo(path, FACTS)
    assert (path / "hub" / "hub.db").exists()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    replace_earlier_demo(tmp_path / "empty", FACTS)  # nothing is replaced there


TASKS, NEW_TOKENS = 96, 10
# Three to eight digits: prompts of six lengths, so that padding matters; the built-in policy sorts some of them.
SORT = EnvironmentSettings(name="sort", options={"min_digits": 3, "max_digits": 8})


@pytest.fixture(scope="module")
def export(tmp_path_factory: TempPaths) -> Path:
    """The built-in policy, exported as the trainer does it."""
    loaded = load_model("tiny")
    folder = tmp_path_factory.mktemp("run") / "export"
    return export_policy(folder, loaded.model.state_dict(), loaded.files, ModelCard(TrainerProgress("run", 0)))


def recipe(environment: EnvironmentSettings = SORT, tasks: int = TASKS) -> Recipe:
    return Recipe.model_validate(
        {"run": {"max_new_tokens": NEW_TOKENS}, "environment": environment, "trainer": {"evaluate_tasks": tasks}}
    )


def trainers_score(environment: EnvironmentSettings, tasks: int = TASKS) -> float:
    loaded = load_model("tiny")
    sampling = SamplingParameters(temperature=1, max_new_tokens=NEW_TOKENS, eos_token_ids=loaded.eos_token_ids)
    made = build(environment)
    held_out = list(made.tasks("held_out"))[:tasks]
    prompts = [loaded.tokenizer.encode(task.prompt) for task in held_out]
    answers = greedy_answers(TorchEngine.wrap(loaded.model), prompts, [None] * len(held_out), sampling)
    scores = [made.score(t, loaded.tokenizer.decode(ids)).value for t, ids in zip(held_out, answers, strict=True)]
    return sum(scores) / len(scores)


@pytest.mark.parametrize("tasks", [1, 63, 65, 1000])
def test_it_comes_to_what_the_trainer_says(export: Path, tasks: int) -> None:
    counted = score(export, recipe(tasks=tasks), StopToken())
    assert counted.tasks == min(tasks, 256), "there are no more held-out tasks than the environment has"
    assert counted.score == trainers_score(SORT, tasks)
    assert tasks < 60 or 0.2 < counted.score < 0.95, "a score at either end would prove little"


def test_the_folders_own_sampling_settings_do_not_count(export: Path, tmp_path: Path) -> None:
    copy = tmp_path / "export"
    shutil.copytree(export, copy)
    (copy / "generation_config.json").write_text(
        '{"eos_token_id": [1, 2], "do_sample": true, "temperature": 5.0, "max_new_tokens": 1, "min_new_tokens": 9}'
    )
    assert score(copy, recipe(), StopToken()) == score(export, recipe(), StopToken())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", ""])
def test_a_damaged_or_absent_export_does_not_load(export: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "export"
    if name:
        shutil.copytree(export, copy)
        (copy / name).write_bytes(b"{damaged")
    with pytest.raises(ModelError, match=r"the export .*export does not load with transformers: \w+: "):
        score(copy, recipe(), StopToken())


@pytest.mark.slow
def test_in_a_process_of_its_own(export: Path, tmp_path: Path) -> None:
    assert recount(export, recipe(), 120, StopToken()) == score(export, recipe(), StopToken())
    with pytest.raises(ShoalError, match=r"could not be scored: the export .* does not load"):
        recount(tmp_path, recipe(), 120, StopToken())


@pytest.mark.parametrize(
    ("timeout_s", "stopped", "said"),
    [(0.01, False, "was not scored within 0 s"), (600, True, r"stopped \(SIGINT\) before .* was scored")],
)
def test_a_deadline_or_a_stop_leaves_no_process(tmp_path, monkeypatch, timeout_s, stopped, said):
    started, original, stop = list[subprocess.Popen[bytes]](), subprocess.Popen, StopToken()

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(original(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    if stopped:
        stop.set("SIGINT")
    with pytest.raises(DeadlineExceeded, match=said):
        recount(tmp_path, recipe(), timeout_s, stop)
    assert [process.returncode for process in started] == [-9]


def test_the_model_side_is_plain_transformers() -> None:
    """Nothing of shoal's own models, engines or sampling may help here: the point is that nobody needs it."""
    source = Path(module.__file__).read_text()
    for package in ("models", "engines", "sampling", "trainer"):
        assert f"shoal.{package}" not in source
