"""The scripted engine: torch-free, and as sensitive to its policy as a real one."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from shoal.engines import GenerationRequest
from shoal.engines.scripted import ScriptedEngine
from shoal.models import from_numpy
from shoal.protocol import SamplingParameters

SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=40, eos_token_id=1)
REQUEST = GenerationRequest((5, 6, 7), tuple(range(50)), SAMPLING)


def loaded(*values: float) -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.load_policy(None, {"w": from_numpy("w", np.array(values, np.float32))})
    return engine


def test_one_bit_of_weight_changes_the_logits():
    one, two = loaded(1.0, 2.0), loaded(1.0, np.nextafter(np.float32(2.0), np.float32(3.0)))
    first = [completion.token_ids.tolist() for completion in one.generate([REQUEST])[0]]
    assert first == [completion.token_ids.tolist() for completion in loaded(1.0, 2.0).generate([REQUEST])[0]]
    second = [completion.token_ids.tolist() for completion in two.generate([REQUEST])[0]]
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 40


def test_completions_end_after_a_handful_of_tokens():
    lengths = [len(completion.token_ids) for completion in loaded(1.0).generate([REQUEST])[0]]
    assert 3 < np.mean(lengths) < 15


def test_vocabulary_and_end_come_from_the_config():
    engine = ScriptedEngine({"config.json": b'{"vocab_size": 11, "eos_token_id": 3}'})
    engine.load_policy(None, {})
    assert engine.vocabulary_size == 11
    [completions] = engine.generate([GenerationRequest((5,), tuple(range(60)), SAMPLING)])
    tokens = np.concatenate([completion.token_ids for completion in completions])
    assert tokens.max() == 10
    assert np.bincount(tokens, minlength=11).argmax() == 3


def test_it_needs_no_torch():
    code = "import sys; from shoal import engines; engines.warm_up('scripted'); engines.build('scripted', {})"
    assert (
        subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=False).returncode == 0
    )


@pytest.mark.slow
def test_warming_up_the_torch_engine_imports_what_building_one_takes():
    code = (
        "import logging; logging.basicConfig(level=20); from shoal import engines; import sys; engines.warm_up('torch')"
    )
    wanted = "{'shoal.engines.torch', 'transformers.modeling_utils'}"
    command = [sys.executable, "-c", f"{code}; sys.exit(not {wanted} <= set(sys.modules))"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0
    said = [
        line.partition("registry:")[2].partition(",")[0] for line in done.stderr.splitlines() if "registry:" in line
    ]
    assert said == ["loading torch", "torch is loaded"]
