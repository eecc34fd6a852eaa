"""The tests of proofs run with both kinds of arithmetic, where they ask for it."""

from collections.abc import Iterator

import pytest

from shoal.toploc import backend


@pytest.fixture(params=["compiled", "plain"], scope="module")
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything compiled, however small, or nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_is_broken", request.param == "plain")
        patch.setattr(backend, "LARGE_VALUES", 0)
        patch.setattr(backend, "LARGE_POINTS", 0)
        yield request.param
