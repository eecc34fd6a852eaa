from __future__ import annotations

import numpy as np
import pytest

from shoal.models import as_numpy, from_numpy
from shoal.models.quantize import INT4, INT8, Quantization, quantized


@pytest.fixture
def matrix() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((48, 96)).astype(np.float32)


@pytest.mark.parametrize(("how", "levels"), [(INT8, 255), (Quantization(bits=4), 15)])
def test_a_row_takes_no_more_values_than_the_bits_allow(matrix: np.ndarray, how: Quantization, levels: int) -> None:
    rounded = how.round(matrix)
    assert max(len(np.unique(row)) for row in rounded) <= levels
    steps = np.abs(matrix).max(axis=1) / (levels // 2)
    assert (np.abs(rounded - matrix) <= steps[:, None] * 0.501).all()


def test_groups_with_an_offset_have_sixteen_levels_each(matrix: np.ndarray) -> None:
    rounded = Quantization(bits=4, group=32, offset=True).round(matrix).reshape(-1, 32)
    assert max(len(np.unique(group)) for group in rounded) <= 16
    assert 0 < np.abs(rounded - matrix.reshape(-1, 32)).max() < 0.25


def test_rounding_again_changes_nothing_more(matrix: np.ndarray) -> None:
    once = INT8.round(matrix)
    assert np.allclose(INT8.round(once), once, atol=1e-6)


def test_zeros_stay_zeros() -> None:
    zeros = np.zeros((2, 32), np.float32)
    assert (INT8.round(zeros) == 0).all()
    assert (INT4.round(zeros) == 0).all()


def test_only_linear_layers_are_touched_and_types_stay(matrix: np.ndarray) -> None:
    bits = (matrix.view(np.uint32) >> 16).astype(np.uint16)
    views = [
        from_numpy("model.embed_tokens.weight", matrix),
        from_numpy("model.norm.weight", matrix[0]),
        from_numpy("model.layers.0.mlp.up_proj.weight", matrix),
        from_numpy("model.layers.0.mlp.down_proj.weight", bits, "BF16"),
    ]
    after = quantized({view.name: view for view in views}, INT8)
    same = [np.array_equal(as_numpy(after[view.name]), as_numpy(view)) for view in views]
    assert same == [True, True, False, False]
    assert [(after[view.name].dtype, after[view.name].shape) for view in views] == [(v.dtype, v.shape) for v in views]
