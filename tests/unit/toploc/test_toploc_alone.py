"""The examples in the docstrings run and say what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

import shoal.toploc
from shoal.toploc import check, package, points


@pytest.mark.parametrize("module", [shoal.toploc, check, package, points])
def test_docstring_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
