"""The points that a GPU chooses are those of the CPU, bit for bit. Needs CUDA: pytest -m gpu tests/gpu."""

import numpy as np
import pytest
import torch

from shoal.toploc import PointBatch, check_proofs, commit, compare, device, top_points
from shoal.toploc.package import build_proofs_bytes, verify_proofs_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

TOPK, ROWS = 128, 32
LENGTHS = [70, 1, 32, 0, 129]


def normal(hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(sum(LENGTHS), hidden, generator=torch.Generator().manual_seed(hidden)).to(dtype)


def tied(hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Five levels: nearly everything is a tie at the k-th place."""
    return torch.randint(-2, 3, (sum(LENGTHS), hidden), generator=torch.Generator().manual_seed(hidden)).to(dtype)


def strange(hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN of both signs, infinities, subnormals, zeros of both signs among ordinary values."""
    values = normal(hidden, torch.float32)
    flat = values.view(-1)
    for offset, value in enumerate(
        [float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 0.0, -0.0]
    ):
        flat[offset * 7 :: 97] = value
    return values.to(dtype)


def assert_same(a: PointBatch, b: PointBatch) -> None:
    for name in ("counts", "sizes", "indices", "bits"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("make", [normal, tied, strange])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [33, 64, 576, 4096, 5120])
def test_cuda_chooses_the_points_of_the_cpu(make: object, dtype: torch.dtype, hidden: int) -> None:
    activations = make(hidden, dtype)  # type: ignore[operator]
    on_cpu = top_points(activations, LENGTHS, TOPK, ROWS)
    assert_same(top_points(activations.cuda(), LENGTHS, TOPK, ROWS), on_cpu)


def test_every_float32_rounds_alike() -> None:
    """All halves of mantissas and exponents: 2^16 high words with the low words that decide the rounding."""
    high = np.arange(2**16, dtype=np.uint32) << 16
    raw = np.concatenate([high | low for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = torch.from_numpy(raw.view(np.float32).copy())
    assert torch.equal(device.bfloat16_bits(values), device.bfloat16_bits(values.cuda()).cpu())


def test_slabs_change_nothing_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    activations = normal(64, torch.bfloat16)
    monkeypatch.setattr(device, "SLAB", 3 * ROWS * 64)
    assert_same(top_points(activations.cuda(), LENGTHS, TOPK, ROWS), top_points(activations, LENGTHS, TOPK, ROWS))


def test_proofs_made_on_one_device_pass_on_the_other() -> None:
    activations = normal(576, torch.bfloat16)
    on_cpu, on_cuda = (top_points(each, LENGTHS, TOPK, ROWS) for each in (activations, activations.cuda()))
    assert commit(on_cpu) == commit(on_cuda)
    assert check_proofs(compare(on_cuda, commit(on_cpu))).passed
    whole = activations[:96]
    proofs = build_proofs_bytes(whole.cuda(), ROWS, TOPK, skip_prefill=True)
    assert proofs == build_proofs_bytes(list(whole), ROWS, TOPK, skip_prefill=True)
    results = verify_proofs_bytes(whole.cuda(), proofs, ROWS, TOPK, skip_prefill=True)
    assert [result.exp_mismatches for result in results] == [0, 0, 0]


def test_only_points_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    activations = normal(4096, torch.bfloat16).cuda()
    moved = []
    to_cpu = torch.Tensor.cpu

    def counted(tensor: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        moved.append(tensor.numel())
        return to_cpu(tensor, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    points = top_points(activations, LENGTHS, TOPK, ROWS)
    assert sum(moved) == len(points.indices)
