"""These tests run where vLLM is installed (`make test-vllm`), and are skipped elsewhere."""

import pytest

from kit.engines import needs_vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "on_vllm":
            item.add_marker(pytest.mark.vllm)
            item.add_marker(needs_vllm)
