"""A whole run with real processes: a reward function that misbehaves, a length budget, a classifier and a judge."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

REWARD = """
import hashlib, random

dice = random.Random(0)
tasks = [{"prompt": f"{dice.randrange(10**5, 10**8)}=", "answer": "hidden"} for _ in range(500)]

def score(prompt, completion, answer):
    kind = hashlib.sha256(completion.encode()).digest()[0] if completion else 255
    if kind < 8:
        while True: pass
    if kind < 12:
        return float(len(bytearray(10**10)))
    wanted = "".join(sorted(prompt.rstrip("=")))
    hits = sum(a == b for a, b in zip(wanted, completion))
    return {"value": hits / max(len(wanted), len(completion)), "notes": "it is " + answer}
"""

RECIPE = """
[run]
name = "scored"
steps = 1
groups_per_step = 8
group_size = 8
max_new_tokens = 10
[model]
path = "tiny"
[environment]
file = "reward.py"
[environment.length]
targets = [4, 6, 8]
alpha = 0.01
text = "{target}"
[environment.scoring]
seconds = 0.5
memory_mb = 200
processes = 2
[[environment.judges]]
label = "model"
path = "classifier"
weight = 0.1
use = "rank"
[[environment.judges]]
label = "taste"
url = "URL"
model = "m"
weight = 0.1
[trainer]
evaluate_every = 0
[hub]
port = 0
[worker]
count = 1
units_per_lease = 8
"""

CLASSIFIER = """
import sys, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

words = ["<pad>", "<unk>"] + [chr(code) for code in range(33, 127)]
tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>").save_pretrained(sys.argv[1])
torch.manual_seed(0)
config = BertConfig(
    vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=64, num_labels=1, initializer_range=0.5,
)
BertForSequenceClassification(config).save_pretrained(sys.argv[1])
"""


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        told = f"Fine.\n{len(asked) % 11}"
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": told}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def python(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def verdicts(database: Path) -> list[dict[str, Any]]:
    connection = sqlite3.connect(database)
    rows = connection.execute("SELECT document FROM verdicts").fetchall()
    connection.close()
    return [json.loads(row[0])["document"] for row in rows]


def test_a_run_scores_within_limits_and_its_verdicts_say_how(tmp_path: Path, judge_url: str) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("URL", judge_url))
    python(tmp_path, "-c", CLASSIFIER, "classifier")
    python(tmp_path, "-m", "shoal.cli", "run", "recipe.toml", "--dir", "run")
    accepted = [each for each in verdicts(tmp_path / "run" / "hub" / "hub.db") if each["outcome"] == "accepted"]
    assert len(accepted) >= 8
    rewards = [reward for verdict in accepted for reward in verdict["rewards"]]
    for reward in rewards:
        parts = reward["parts"]
        added = 0.1 * parts["judge.model"] + 0.1 * parts["judge.taste"]
        assert reward["value"] == pytest.approx(parts["task"] + parts["length"] + added)
        assert parts["target"] in (4, 6, 8)
        assert 0 <= parts["judge.model"] <= 1
        assert parts["task"] == 0 or "limit" not in parts
    assert any("limit" in reward["parts"] for reward in rewards), "none of them looped; choose other kinds"
    for verdict in accepted:
        assert verdict["unreproducible"] == ["judge.taste"]
        assert (verdict["environment"], len(verdict["environment_digest"])) == ("reward", 64)
        assert "hidden" not in json.dumps(verdict)
    assert "it is hidden" in (tmp_path / "run" / "validator-0" / "notes.jsonl").read_text()
