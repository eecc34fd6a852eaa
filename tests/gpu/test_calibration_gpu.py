"""Limits are measured on a GPU: every attention kernel that it has, in both number formats."""

from __future__ import annotations

import sys

import pytest
import torch

from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings, build
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.validator.calibrate import Plan, measure, prompts_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_both_formats_are_measured_with_the_kernels_of_the_gpu() -> None:
    loaded = load_model("tiny", "bfloat16")
    validator = TorchEngine(loaded.files, "float32", "cuda")
    validator.load_policy(None, policy_views(loaded.model))
    plan = Plan(prompts_of(loaded.files, build(EnvironmentSettings(name="sort")), 12), loaded.eos_token_id, tokens=12)
    seconds = 0.0
    for dtype, pages in (("float32", True), ("bfloat16", True), ("bfloat16", False)):
        worker = validator.copied(loaded.files, dtype, pages=pages)
        found = measure(worker, {"cuda/float32": validator}, plan)
        assert found.profile.key == f"{'torch' if pages else 'torch-plain'}/cuda/{dtype}"
        names = {name for name, _ in found.variants}
        assert {"batch 1", "batch 64", "main"} <= names
        assert ({"eager", "math"} <= names) == (not pages)
        assert (len(names & {"flash", "efficient"}) >= 1) == (not pages)
        assert found.failures == {"cuda/float32": []}
        int4 = [catch for catch in found.catches if catch.cheat == "int4 weights"]
        assert all(catch.by_either == 1.0 for catch in int4)
        seconds += found.seconds
    sys.stderr.write(f"measured in {seconds:.1f} s\n")
