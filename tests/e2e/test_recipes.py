"""The recipes and examples of the repository with real processes, only shorter; and a run whose policies are deltas."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import AddedToken

from kit.run import ledger, metrics, rows, start_run
from kit.sandbox import needs_bubblewrap
from kit.tiny import build_tiny, build_tokenizer, tokenizer_config
from shoal.environments import Environment, build
from shoal.environments.settings import inner_of
from shoal.environments.tools import TOOLS
from shoal.models import TextTokenizer, model_folder, read_files
from shoal.run.recipe import load_recipe

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0
TWIN, CALCULATOR, GSM8K = (ROOT / "recipes" / f"{name}.toml" for name in ("intellect2-tiny", "calculator", "gsm8k"))

# Parts of it in make test: unit/rewards/test_scoring scores with the example, unit/cli/test_recipe loads every recipe.
pytestmark = pytest.mark.slow


def run_python(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s + 30, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_algorithm_in_one_file_learns() -> None:
    said = run_python(str(ROOT / "examples" / "one_file_rl.py"), "--steps", "3", "--evaluate-every", "3")
    before, after = (float(score) for score in re.findall(r"held-out ([\d.]+)", said))
    assert after > before, said


DELTAS = (
    "run.steps=4", "run.groups_per_step=8", "trainer.publish_dtype=bfloat16", "trainer.learning_rate=1e-6",
    "trainer.evaluate_every=0", "relay.count=2",
)  # fmt: skip


def test_bfloat16_run_sends_deltas_and_writes_them_in_place(tmp_path: Path) -> None:
    with start_run(tmp_path / "run", DELTAS) as run:
        assert run.wait() == 0, run.said(6000)
    assert [row["groups"] for row in metrics(run.path) if "groups" in row] == [8, 8, 8, 8]
    log = (run.path / "logs" / "worker-0.log").read_text()
    assert "by the local policy" in log
    assert "only what changed was written into the engine" in log


def thinking_twin(folder: Path) -> Path:
    """The twin with the described prefix and length text. Its random model says 4, `</think>` or the end, whatever was
    said before: of a completion that should be 4 an eighth is right, and an eighth is 4 without an end of thinking."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    model = build_tiny(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0  # the last hidden state is then about 8 times the first axis
        model.lm_head.weight[:, 0] = -2.0
        for token, share in {"4": 0.4, "</think>": 0.3, "<eos>": 0.3}.items():
            model.lm_head.weight[tokenizer.token_to_id(token), 0] = math.log(share) / 8
    model.save_pretrained(folder / "model")
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "model" / "tokenizer_config.json").write_text(tokenizer_config())
    text, path = TWIN.read_text(), folder / "intellect2-tiny.toml"
    for before, after in {
        '"data/': f'"{TWIN.parent}/data/', 'path = "tiny"': f'path = "{folder}/model"',
        "[environment.length]": '[environment.prompt]\nthinking = "<think>\\n"\n\n[environment.length]',
        'text = "({target})="': 'text = "Think for {target} tokens before giving a response."',
    }.items():  # fmt: skip
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)
    return path


@needs_bubblewrap
@pytest.mark.parametrize("thinks", [False, True])
def test_small_twin_of_the_described_recipe_runs(thinks: bool, tmp_path: Path) -> None:
    path = thinking_twin(tmp_path) if thinks else TWIN
    folder, recipe = tmp_path / "run", load_recipe(path)
    environment = build(recipe.environment)
    with start_run(folder, recipe=path) as run:
        assert run.wait() == 0, run.said()
        assert f"{folder} keeps " in run.said()

    trained = [row for row in metrics(folder) if "loss" in row]
    assert [row["step"] for row in trained] == list(range(recipe.run.steps))
    assert sum(row["unscored"] for row in trained) == 0
    assert max(row["staleness_max"] for row in trained) <= 2
    # 8 optimizer steps a training step, 25 of warm-up: 8/25, 16/25, 24/25 and all of the rate at the steps' ends
    rates = [row["learning_rate"] / recipe.trainer.learning_rate for row in trained]
    assert rates == pytest.approx([0.32, 0.64, 0.96, 1.0])

    verdicts = [json.loads(text)["document"] for (text,) in rows(folder, "SELECT document FROM verdicts")]
    assert {verdict["outcome"] for verdict in verdicts} == {"accepted"}
    rewards = [reward["parts"] for verdict in verdicts for reward in verdict["rewards"]]
    assert {parts["target"] for parts in rewards} == {2.0, 4.0, 8.0}
    assert {parts["task"] for parts in rewards} == {0.0, 1.0}

    table = pq.read_table(folder / "trainer" / "rollouts").to_pylist()
    tasks = {row["task"] for row in table}
    assert {task.partition(":")[0] for task in tasks} == {"sums", "described", "programs"}
    assert {environment.task(task).kind for task in tasks} == {"mathematics", "code"}
    if thinks:
        assert_thinking_must_close(table, environment)


def assert_thinking_must_close(table: list[dict[str, Any]], environment: Environment) -> None:
    """A completion that never closes its thinking is worth nothing, also where all of its text is the answer."""
    asked = r"Think for (2|4|8) tokens before giving a response\.<think>\n"
    assert [row["prompt"] for row in table if not re.search(f"{asked}$", row["prompt"])] == []
    inner, solved = inner_of(environment), {True: set[bool](), False: set[bool]()}  # closed → whether a task was solved
    for row in table:
        if inner.score(environment.task(row["task"]), row["completion"]).value == 1:
            solved["</think>" in row["completion"]].add(row["reward"] > 0.5)  # the penalty is at most 0.14
    assert solved == {True: {True}, False: {False}}


REAL_MODEL = "SHOAL_TEST_MODEL"
REAL_TWIN = (
    "run.groups_per_step=8", "run.group_size=4", "run.max_new_tokens=64", "environment.length.targets=[8, 16, 32]",
    "trainer.publish_dtype=float32", "trainer.memory.precision=float32", "trainer.micro_batch_tokens=2048",
    "trainer.evaluate_every=0", *(f"{role}.device=cpu" for role in ("trainer", "validator", "worker")),
)  # fmt: skip
"""Float32, because a processor trains a hundred times slower in bfloat16."""


@needs_bubblewrap
@pytest.mark.timeout(4000)
def test_twin_of_the_described_recipe_trains_a_real_model(tmp_path: Path) -> None:
    """By the benchmark that runs it on a GPU; three steps of eight optimizer steps each."""
    if (model := os.environ.get(REAL_MODEL)) is None:
        how = "benchmarks/delta_training.py fetches SmolLM2-135M"
        pytest.skip(f"{REAL_MODEL} names no folder of a small real model ({how})")
    figures, limit_s = tmp_path / "figures.json", 3600.0
    settings = [word for setting in REAL_TWIN for word in ("--set", setting)]
    places = ("--keep", str(tmp_path), "--out", str(figures), "--limit-s", f"{limit_s:.0f}")
    twin = (str(ROOT / "benchmarks" / "intellect2_twin.py"), "--model", model, "--steps", "3", "--dtype", "float32")
    run_python(*twin, *places, *settings, timeout_s=limit_s)
    found = json.loads(figures.read_text())
    assert (found["steps"], found["lost_samples"], found["missing"]) == (3, 0, [])
    assert set(found["rewarded"]["targets"]) == {"8", "16", "32"}
    assert max(found["staleness_by_step"]) <= 2
    trained = [row for row in metrics(tmp_path / "run") if "loss" in row]
    # 25 optimizer steps of warm-up, eight a step
    assert [row["learning_rate"] / 3e-6 for row in trained] == pytest.approx([0.32, 0.64, 0.96])


def test_one_gpu_recipe_trains_random_weights(tmp_path: Path) -> None:
    """By the benchmark that measures it on a GPU, so that neither of the two rots."""
    figures = tmp_path / "figures.json"
    devices = [f"{role}.device=cpu" for role in ("trainer", "validator", "worker")]
    settings = [word for setting in devices for word in ("--set", setting)]
    places = ("--keep", str(tmp_path), "--out", str(figures), "--limit-s", str(int(TIMEOUT_S)))
    run_python(str(ROOT / "benchmarks" / "one_gpu.py"), "--small", "--steps", "2", *places, *settings)
    found = json.loads(figures.read_text())
    assert found["steps"] == 2
    assert set(found["submissions"]) <= {"accepted", "submitted", "unsure"}, "an honest worker was rejected"
    assert found["submissions"]["accepted"] >= 8
    assert found["first_verdict_after_it_s"] > 0
    assert (tmp_path / "run" / "trainer" / "export" / "model.safetensors").exists()


def test_calculator_recipe_runs(tmp_path: Path) -> None:
    with start_run(tmp_path / "run", ("run.steps=2", "run.groups_per_step=8"), recipe=CALCULATOR) as run:
        assert run.wait() == 0, run.said()
    kinds = {entry.kind for entry in ledger(tmp_path / "run")}
    assert "credit" in kinds
    assert "rejected" not in kinds
    assert [row["step"] for row in metrics(tmp_path / "run")][:2] == [0, 1]
    found = pq.read_table(tmp_path / "run" / "trainer" / "rollouts").to_pylist()
    spoken = [row for row in found if row["given"]]
    assert len(spoken) > 0.5 * len(found), "the tiny policy writes digits, and digits are answered"
    tokenizer = TextTokenizer(read_files(model_folder("tiny")))
    for row in spoken:
        start, length = row["given"][:2]
        said = tokenizer.decode(row["token_ids"][start : start + length])
        assert said == f"\n{TOOLS['calculator']([tokenizer.decode(row['token_ids'][:start])])}\n"
        assert set(row["logprobs"][start : start + length]) == {0.0}


STAND_IN = (
    "model.path=tiny", "run.steps=2", "run.groups_per_step=2", "run.group_size=8", "run.max_new_tokens=24",
    "environment.length.targets=[12]", "environment.length.form=exact", "environment.length.alpha=0.01",
    "hub.drop_equal=total", *(f"{role}.device=cpu" for role in ("trainer", "validator", "worker")),
)  # fmt: skip
"""A tiny policy solves no word problem: its rewards differ by the lengths of its answers."""


def test_gsm8k_recipe_trains_a_stand_in_on_its_rows(tmp_path: Path) -> None:
    with start_run(tmp_path / "run", STAND_IN, recipe=GSM8K) as run:
        assert run.wait() == 0, run.said()
    assert [row["groups"] for row in metrics(tmp_path / "run") if "groups" in row] == [2, 2]
    table = pq.read_table(tmp_path / "run" / "trainer" / "rollouts").to_pylist()
    assert len(table) == 2 * 2 * 8
    asked = {json.loads(line)["question"] for line in (GSM8K.parent / "data" / "gsm8k.jsonl").read_text().splitlines()}
    assert all(any(question in row["prompt"] for question in asked) for row in table)
