"""A stranger joins a run of a real model shape with nothing but its URL: real processes, `shoal run` and `shoal join`.

    model folder (random weights) ─► shoal doctor --calibrate ─► shoal run (hub, trainer, validator) ◄─ shoal join URL

The joined worker gets no option about number format or batch: it must follow the run. Afterwards the same again while
another process holds most of the device's memory, and once with a number format that no validator of the run can judge.

    python benchmarks/stranger_gpu.py --device cuda                       # Qwen3-0.6B shape, bfloat16
    python benchmarks/stranger_gpu.py --device cpu --small --dtype float32 --groups 4
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REWARD = '''
import random
source = random.Random(0)
tasks = [{"prompt": f"{source.getrandbits(256):064x}"} for _ in range(4096)]


def score(prompt: str, completion: str, answer: str) -> float:
    """The share of words with an even number: every group has unequal rewards, whatever the model writes."""
    words = [word for word in completion.split() if word[1:].isdigit()]
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)
'''
PATIENCE_S = 420.0


SHAPES = {
    "small": (512, 64, 128, 2, 4, 2, 16),
    "0.6b": (151_936, 1024, 3072, 28, 16, 8, 128),
    "8b": (151_936, 4096, 12_288, 36, 32, 8, 128),
}
"""Qwen3 by its names: vocabulary, hidden size, inner size, layers, heads, key heads, head size."""


def make_model(folder: Path, shape: str, dtype: str, device: str = "cpu") -> None:
    """A model folder of this shape with random weights; its tokens are bytes and made-up words."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary_size, hidden, inner, layers, heads, key_heads, head = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary_size, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=head, tie_word_embeddings=shape != "8b",
        max_position_embeddings=4096, eos_token_id=1, dtype=dtype,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(len(letters), vocabulary_size)]
    vocabulary = {token: number for number, token in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[1]).save_pretrained(folder)


def recipe(folder: Path, options: argparse.Namespace, profile: Path | None) -> Path:
    profiles = f'profiles = ["{profile}"]' if profile else ""
    text = f"""
[run]
name = "stranger"
steps = 100
groups_per_step = 16
group_size = {options.group_size}
max_staleness = 4
max_new_tokens = {options.tokens}

[model]
path = "{folder / "model"}"

[environment]
file = "{folder / "reward.py"}"
held_out_size = 16

[trainer]
device = "{options.device}"
publish_dtype = "{options.dtype}"
memory.precision = "{options.dtype}"
evaluate_every = 0

[validator]
device = "{options.device}"
dtype = "{options.dtype}"
{profiles}

[hub]
port = 0

[worker]
count = 0
"""
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def join_url(endpoints: Path) -> str | None:
    from shoal.protocol import fingerprint

    if not endpoints.exists():
        return None
    found = json.loads(endpoints.read_text())
    return f"{found['hub']}/#{fingerprint(found['root_key'])}" if found.get("hub") else None


def shoal(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "shoal.cli", *map(str, arguments)]


@contextmanager
def started(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(what: str, found: Any, deadline_s: float, *alive: subprocess.Popen[bytes]) -> Any:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        for process in alive:
            if process.poll() is not None:
                raise SystemExit(f"while waiting for {what}: process {process.args!r} ended with {process.returncode}")
        time.sleep(0.5)
    raise SystemExit(f"waited {deadline_s:.0f} s for {what} in vain")


def status_of(url: str) -> dict[str, Any]:
    import httpx2

    try:
        answer: dict[str, Any] = httpx2.get(url.split("/#")[0] + "/status", timeout=30, trust_env=False).json()
    except httpx2.TransportError:
        return {"nodes": []}
    return answer


def workers(url: str) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in status_of(url)["nodes"] if node["role"] == "worker"}


def joined(name: str, url: str, folder: Path, groups: int, run: subprocess.Popen[bytes], *more: str) -> dict[str, Any]:
    """One worker that joins by its URL alone, until the hub has accepted that many of its groups."""
    began = time.monotonic()
    log = folder / f"{name}.log"
    seen: dict[str, float] = {}
    with started(shoal("join", url, "--name", name, "--folder", folder / name, *more), log) as worker:

        def enough() -> bool:
            node = workers(url).get(name, {})
            for mark in (1, groups):
                if node.get("accepted", 0) >= mark:
                    seen.setdefault(str(mark), time.monotonic() - began)
            return node.get("accepted", 0) >= groups or node.get("state", "active") != "active"

        wait_for(f"{groups} accepted groups of {name}", enough, PATIENCE_S, run, worker)
        node = workers(url)[name]
    said = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if any(word in line for word in ("memory", "computing on", "rows", "sandbox"))
    ]
    return {
        "first_accepted_s": round(seen.get("1", -1), 1),
        "all_accepted_s": round(seen.get(str(groups), -1), 1),
        **{key: node[key] for key in ("state", "accepted", "rejected", "unsure", "credit")},
        "said": said[:6],
    }


HOG = """
import sys, time, torch
free, total = torch.cuda.mem_get_info()
leave = int(float(sys.argv[1]) * 2**30)
held = torch.empty(max(free - leave, 0), dtype=torch.uint8, device="cuda")
print("holding", len(held), flush=True)
time.sleep(3600)
"""


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    make_model(folder / "model", "small" if options.small else "0.6b", options.dtype)
    (folder / "reward.py").write_text(REWARD)
    result: dict[str, Any] = {"machine": machine(options.device), "shape": "small" if options.small else "Qwen3-0.6B"}
    profile = None
    if options.calibrate:
        began, profile = time.monotonic(), folder / "profile.toml"
        kind = f"{options.device}/{options.dtype}"
        subprocess.run(
            shoal(
                "doctor", "--calibrate", "--model", folder / "model", "--device", options.device, "--dtype",
                options.dtype, "--against", kind, "--samples", options.sequences, "--max-new-tokens", options.tokens,
                "--out", profile,
            ),
            check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        result["calibrate_s"] = round(time.monotonic() - began, 1)
    run_folder = folder / "run"
    with started(shoal("run", recipe(folder, options, profile), run_folder), folder / "run.log") as run:
        url = wait_for("the join URL", lambda: join_url(run_folder / "endpoints.json"), PATIENCE_S, run)
        wait_for("the first policy", lambda: status_of(url).get("policy"), PATIENCE_S, run)
        result["free device"] = joined("stranger", url, folder, options.groups, run)
        if options.device == "cuda" and options.leave_gib:
            hog = [sys.executable, "-c", HOG, str(options.leave_gib)]
            with started(hog, folder / "hog.log") as holder:
                wait_for("the memory to be held", lambda: b"holding" in (folder / "hog.log").read_bytes(), 60, holder)
                result[f"{options.leave_gib} GiB free"] = joined("cramped", url, folder, options.groups, run)
        if options.sandbox:
            result["in the sandbox"] = joined("boxed", url, folder, options.groups, run, "--sandbox")
        other = "float32" if options.dtype == "bfloat16" else "bfloat16"
        refused = subprocess.run(
            shoal("join", url, "--name", "other", "--folder", folder / "other", "--dtype", other, "--device",
                  options.device),
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        result[f"join --dtype {other}"] = {"exit": refused.returncode, "said": refused.stderr.strip()[-400:]}
        status = status_of(url)
        result["run"] = {"step": status.get("step"), "units": status.get("units"), "alarms": status.get("alarms")}
    return result


def machine(device: str) -> str:
    if device != "cuda":
        return f"{platform.machine()}, {os.cpu_count()} cores"
    import torch

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a toy shape, to try the script")
    parser.add_argument("--calibrate", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--sandbox", action="store_true", help="join once more with --sandbox (needs bubblewrap)")
    parser.add_argument("--leave-gib", type=float, default=6.0, help="free memory of the second join; 0: no such join")
    parser.add_argument("--keep", type=Path, help="a folder for models and logs, instead of one that is removed")
    options = parser.parse_args()
    if options.device == "cuda" and not has_gpu():
        print("no GPU here: nothing was measured (--device cpu --small --dtype float32 tries the script)")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure(options, folder), indent=2))


if __name__ == "__main__":
    main()
