"""The engines that contract suites run against; vLLM's only where it is installed (`make test-vllm`)."""

from importlib.util import find_spec
from typing import Any

import pytest

from shoal.engines import ENGINES

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm")
ENGINE_NAMES: list[Any] = [
    pytest.param(name, marks=[pytest.mark.vllm, needs_vllm]) if name == "vllm" else name for name in sorted(ENGINES)
]
