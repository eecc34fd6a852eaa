"""Chunks and their largest values: every arithmetic and every type of input chooses the same points."""

import doctest
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import normal, tied

import shoal.toploc
from shoal.errors import ProofError
from shoal.toploc import PointBatch, backend, check, chunk_rows, chunk_topk, device, kernels, plain, points, top_points
from shoal.toploc.plain import PRIME, inverses, least_modulus


def by_sorting(bits: npt.NDArray[np.uint16], count: int) -> list[int]:
    """What is meant by the largest: sort by magnitude, then by index."""
    keyed = sorted(range(len(bits)), key=lambda i: (-(int(bits[i]) & 0x7FFF), i))
    return sorted(keyed[:count])


SHAPES = [(1, 4, 1), (3, 7, 5), (2, 64, 8), (5, 33, 40), (8, 64, 128), (9, 100, 128), (32, 96, 128)]
MAKERS = {
    "normal": lambda rows, hidden: plain.bfloat16_bits(normal(3, rows, hidden)),
    "tied": lambda rows, hidden: tied(4, rows, hidden),
    "zeros": lambda rows, hidden: np.zeros((rows, hidden), np.uint16),
    "every pattern": lambda rows, hidden: np.random.default_rng(5).integers(0, 2**16, (rows, hidden)).astype(np.uint16),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("rows", "hidden", "count"), SHAPES)
def test_all_selections_agree_with_sorting(maker: str, rows: int, hidden: int, count: int) -> None:
    """Three chunks in one call, the last one shorter; ties, NaN, infinities, and sizes that no block divides."""
    bits = np.concatenate(
        [MAKERS[maker](rows, hidden).reshape(-1)] * 2 + [MAKERS[maker](rows, hidden).reshape(-1)[:-1]]
    )
    sizes = np.array([rows * hidden, rows * hidden, rows * hidden - 1])
    counts = np.array([count, max(1, count // 2), min(count, int(sizes[2]))])
    starts = np.cumsum(sizes) - sizes
    wanted = [by_sorting(bits[a : a + n], k) for a, n, k in zip(starts, sizes, counts, strict=True)]
    flat = [index for chunk in wanted for index in chunk]
    for indices, chosen in (
        plain.select(bits, starts, sizes, counts),
        kernels.select(bits, starts, sizes, counts),
        device.select(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), sizes, counts),
    ):
        assert indices.tolist() == flat
        assert chosen.tolist() == [int(bits[a + i]) for a, chunk in zip(starts, wanted, strict=True) for i in chunk]


def test_rounding_is_torch_rounding_and_nan_stays_nan() -> None:
    # halfway cases to even both ways, carries into the exponent and to infinity, NaN of either sign, subnormals
    raw = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x3FFFFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
           0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x00000001, 0x00008000, 0x80018000, 0x00000000]  # fmt: skip
    values = np.concatenate([np.array(raw, np.uint32).view(np.float32), normal(1, 64, 64).reshape(-1)])
    want = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    is_nan = np.isnan(values)
    assert is_nan.sum() == 4
    every = np.arange(len(values))
    _, compiled = kernels.select(values, np.array([0]), np.array([len(values)]), np.array([len(values)]))
    on_device = device.bfloat16_bits(torch.from_numpy(values)).numpy().view(np.uint16)
    for found in (plain.bfloat16_bits(values), compiled[every], on_device):
        assert (found[~is_nan] == want[~is_nan]).all()
        assert (found[is_nan] == plain.QUIET_NAN).all()


def test_every_type_gives_the_points_of_its_bfloat16() -> None:
    values = normal(2, 70, 64)
    want = top_points(plain.bfloat16_bits(values), [40, 30], 128, 32)
    tensor = torch.from_numpy(values)
    for given_ in (values, tensor, tensor.bfloat16(), tensor.clone().requires_grad_()):
        assert same(top_points(given_, [40, 30], 128, 32), want)
    half = values.astype(np.float16)
    want_half = top_points(plain.bfloat16_bits(half.astype(np.float32)), [70], 128, 32)
    assert same(top_points(half, [70], 128, 32), want_half)
    assert same(top_points(tensor.half(), [70], 128, 32), want_half)
    assert same(PointBatch(*device.select(tensor.half().view(-1), want_half.sizes, want_half.counts), want_half.counts,
                           want_half.sizes), want_half)  # fmt: skip


def same(a: PointBatch, b: PointBatch) -> bool:
    pairs = ((a.indices, b.indices), (a.bits, b.bits), (a.counts, b.counts), (a.sizes, b.sizes))
    return all(np.array_equal(x, y) for x, y in pairs)


def test_a_tensor_on_the_cpu_is_not_copied() -> None:
    from shoal.toploc.points import host_array

    for tensor in (torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)):
        assert host_array(tensor).ctypes.data == tensor.data_ptr()


def test_other_types_and_shapes_are_refused() -> None:
    with pytest.raises(TypeError, match="not float64"):
        top_points(np.zeros((32, 8)), [32], 8, 32)
    with pytest.raises(TypeError, match="float64"):
        device.bfloat16_bits(torch.zeros(8, dtype=torch.float64))
    with pytest.raises(ValueError, match="31 rows together, the activations 32"):
        top_points(normal(0, 32, 8), [31], 8, 32)
    with pytest.raises(ValueError, match="3 dimensions"):
        top_points(normal(0, 32, 8)[None], [32], 8, 32)
    with pytest.raises(ProofError, match="has 0 values"):
        top_points(np.zeros((3, 0), np.float32), [3], 128, 32)
    with pytest.raises(ValueError, match="-1"):
        chunk_rows(-1, 32)
    assert len(top_points(np.zeros((0, 64), np.float32), [0, 0], 128, 32)) == 0


def test_chunks_do_not_cross_sequences_and_slabs_that_bound_the_memory_change_nothing(monkeypatch):
    values = normal(6, 100, 64)
    together = top_points(values, [33, 0, 67], 128, 32)
    alone = PointBatch.concat([top_points(values[:33], [33], 128, 32), top_points(values[33:], [67], 128, 32)])
    assert same(together, alone)
    assert together.sizes.tolist() == [32 * 64, 64, 32 * 64, 32 * 64, 3 * 64]
    assert together.counts.tolist() == [128, 8, 128, 128, 12]
    monkeypatch.setattr(device, "SLAB", 2 * 32 * 64)
    indices, bits = device.select(torch.from_numpy(values).view(-1), together.sizes, together.counts)
    assert same(PointBatch(indices, bits, together.counts, together.sizes), together)


def test_slices_and_concatenation() -> None:
    batch = top_points(normal(8, 200, 64), [70, 130], 128, 32)
    parts = [batch[0:3], batch[3:4], batch[4:4], batch[4:]]
    assert [len(part) for part in parts] == [3, 1, 0, len(batch) - 4]
    assert same(PointBatch.concat(parts), batch)
    assert same(batch[-1:], batch[len(batch) - 1 :])
    assert same(batch[5:2], batch[5:5])
    assert len(PointBatch.concat([])) == 0
    with pytest.raises(ValueError, match="step"):
        batch[::2]


sizes = st.integers(1, 64)


@given(r=sizes, rows=sizes, hidden=st.integers(1, 8192), topk=st.integers(1, 1024))
def test_the_number_of_points_of_a_chunk(r: int, rows: int, hidden: int, topk: int) -> None:
    r = min(r, rows)
    k = chunk_topk(r, hidden, topk, rows)
    assert 1 <= k <= topk
    assert k == 1 or 4 * k <= r * hidden
    if 4 * topk <= rows * hidden:
        assert chunk_topk(rows, hidden, topk, rows) == topk
    if 4 * max(8, topk) <= r * hidden:
        assert k >= min(topk, 8)
        assert k * rows >= topk * r  # in proportion, rounded up
    if r > 1:
        assert k >= chunk_topk(r - 1, hidden, topk, rows)


@given(length=st.integers(0, 500), rows=sizes)
def test_chunks_cover_a_sequence(length: int, rows: int) -> None:
    heights = chunk_rows(length, rows)
    assert sum(heights) == length
    assert all(height == rows for height in heights[:-1])
    assert all(0 < height <= rows for height in heights)


def test_inverses_and_the_least_modulus() -> None:
    values = np.arange(1, PRIME, dtype=np.int64)
    assert (values * inverses()[1:] % PRIME == 1).all()
    assert [least_modulus(k) for k in (1, 8, 128)] == [65433] * 3
    assert least_modulus(128) > least_modulus(384) > least_modulus(512) > least_modulus(1024) == 2**15 + 1


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), k=st.sampled_from([1, 2, 7, 64, 128]), outside=st.sampled_from([0, 16, 256]))
def test_compiled_and_plain_give_the_same_numbers(seed: int, k: int, outside: int) -> None:
    """Interpolation by Lagrange against Newton, and the errors of proofs that are right, nearly right and random."""
    draw = np.random.default_rng(seed)
    size = int(draw.choice([k, 4 * k, 3000, 70000, 300000]))
    size = max(size, k)
    indices = np.concatenate([np.sort(draw.choice(size, k, replace=False)) for _ in range(3)])
    bits = draw.integers(0, 2**16, 3 * k).astype(np.uint16)
    counts, all_sizes = np.full(3, k), np.full(3, size)
    moduli, coefficients = plain.interpolate(indices, bits, counts)
    assert_equal(kernels.interpolate(indices, bits, counts), (moduli, coefficients))
    coefficients[2 * k :] = draw.integers(0, PRIME, k)
    seen = bits ^ (draw.random(3 * k) < 0.3).astype(np.uint16)
    arguments = (indices, seen, counts, all_sizes, moduli, coefficients, outside)
    assert_equal(kernels.measure(*arguments), plain.measure(*arguments))


def assert_equal(found: object, wanted: object) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[call-overload]


def test_large_k_finds_its_modulus() -> None:
    indices = np.sort(np.random.default_rng(1).choice(32 * 4096, 700, replace=False))
    bits, counts = np.zeros(700, np.uint16), np.array([700])
    (modulus,), _ = kernels.interpolate(indices, bits, counts)
    assert len(set((indices % modulus).tolist())) == 700
    assert all(len(set((indices % m).tolist())) < 700 for m in range(modulus + 1, PRIME + 1))
    assert plain.interpolate(indices, bits, counts)[0][0] == modulus >= least_modulus(700)


def test_numba_is_used_for_large_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(kernels, "interpolate", lambda *_: used.append("kernels"))
    monkeypatch.setattr(plain, "interpolate", lambda *_: used.append("plain"))
    backend._run("interpolate", True)
    backend._run("interpolate", False)  # it is there already, so it may as well
    monkeypatch.delitem(sys.modules, backend.KERNELS)
    backend._run("interpolate", False)
    monkeypatch.setattr(backend, "_is_broken", True)
    backend._run("interpolate", True)
    assert used == ["kernels", "kernels", "plain", "plain"]


def test_where_numba_is_broken_numpy_does_the_work_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(backend, "_is_broken", False)
    monkeypatch.setattr(kernels, "interpolate", fails)
    points = top_points(np.random.default_rng(0).standard_normal((64, 64), np.float32), [64], 128, 32)
    with pytest.warns(UserWarning, match="no locator available.*numpy"):
        moduli, _ = backend.interpolate(points.indices, points.bits, points.counts)
    assert moduli.tolist() == [65497, 65497]
    assert backend._is_broken
    monkeypatch.setattr(backend, "_is_broken", False)


def test_small_work_does_not_import_numba() -> None:
    """A demo should not wait for a compiler."""
    script = """
import sys, numpy as np
from shoal.toploc import check_proofs, commit, compare, top_points
points = top_points(np.random.default_rng(0).standard_normal((70, 64), np.float32), [70], 128, 32)
print(check_proofs(compare(points, commit(points))).passed, [m for m in ("torch", "numba") if m in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "True []"


@pytest.mark.parametrize("module", [shoal.toploc, check, points])
def test_docstring_examples(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
