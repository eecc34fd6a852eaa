"""A whole run with real processes: a reward function that misbehaves, a length budget and a judge."""

import json
from pathlib import Path

import pytest

from kit.hostile import Answer, Asked, answering
from kit.run import rows, start_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

REWARD = """
import hashlib, random

rng = random.Random(0)
tasks = [{"prompt": f"{rng.randrange(10**5, 10**8)}=", "answer": "hidden"} for _ in range(500)]

def score(prompt, completion, answer):
    kind = hashlib.sha256(completion.encode()).digest()[0] if completion else 255
    if kind < 16:
        while True: pass
    if kind < 24:
        return float(len(bytearray(10**10)))
    wanted = "".join(sorted(prompt.rstrip("=")))
    hits = sum(a == b for a, b in zip(wanted, completion))
    return {"value": hits / max(len(wanted), len(completion)), "notes": "it is " + answer}
"""

RECIPE = """
run = {name = "scored", steps = 1, groups_per_step = 8, group_size = 8, max_new_tokens = 10}
model = {path = "tiny"}
trainer = {evaluate_every = 0}
hub = {port = 0}
worker = {count = 1, units_per_lease = 8}
[environment]
file = "reward.py"
length = {targets = [4, 6, 8], alpha = 0.01, text = "{target}"}
scoring = {seconds = 0.5, memory_mb = 200, processes = 2}
judges = [{label = "taste", url = "URL", model = "m", weight = 0.1}]
"""


def judged(asked: Asked) -> Answer:
    told = {"role": "assistant", "content": f"Fine.\n{len(asked.body) % 11}"}
    return 200, {}, json.dumps({"choices": [{"message": told}]}).encode()


def test_run_scores_within_limits(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    with answering(judged) as judge:
        (tmp_path / "recipe.toml").write_text(RECIPE.replace("URL", f"{judge}/v1"))
        with start_run(tmp_path / "run", recipe=tmp_path / "recipe.toml") as run:
            assert run.wait(300) == 0, run.said()
    verdicts = [json.loads(text)["document"] for (text,) in rows(run.path, "SELECT document FROM verdicts")]
    accepted = [each for each in verdicts if each["outcome"] == "accepted"]
    assert len(accepted) >= 8
    rewards = [reward for verdict in accepted for reward in verdict["rewards"]]
    for reward in rewards:
        parts = reward["parts"]
        assert reward["value"] == pytest.approx(parts["task"] + parts["length"] + 0.1 * parts["judge.taste"])
        assert parts["target"] in (4, 6, 8)
        assert parts["task"] == 0 or "limit" not in parts
    assert any("limit" in reward["parts"] for reward in rewards), "none of them looped; choose other kinds"
    for verdict in accepted:
        assert verdict["unreproducible"] == ["judge.taste"]
        assert (verdict["environment"], len(verdict["environment_digest"])) == ("reward", 64)
        assert "hidden" not in json.dumps(verdict)
    assert "it is hidden" in (tmp_path / "run" / "validator-0" / "notes.jsonl").read_text()
