"""How many units a worker asks for, by what its engine can hold."""

from __future__ import annotations

from typing import Any, cast

from shoal.engines.scripted import ScriptedEngine
from shoal.protocol import Lease, PolicyRef, SamplingParameters
from shoal.worker.fitting import units_that_fit


def lease(prompt: int, seeds: int) -> Lease:
    return Lease(
        run="r-000000000000", lease="l", node="n" * 32, unit=1, attempt=0, task="t", prompt_ids=(5,) * prompt,
        policy=PolicyRef(incarnation=0, version=0, digest="0" * 64), seeds=tuple(f"{i:016x}" for i in range(seeds)),
        sampling=SamplingParameters(temperature=1.0, max_new_tokens=90, eos_token_id=1), environment_digest="e" * 64,
        issued_at_ms=0, deadline_ms=1,
    )  # fmt: skip


class Small(ScriptedEngine):
    memory_bytes: int | None = None

    def rows_at_once(self, tokens_each: int) -> int:
        return 4000 // tokens_each


def test_as_many_units_as_fit_into_memory_together() -> None:
    assert units_that_fit(Small(), [lease(10, 8), lease(3, 8)]) == 5  # 40 rows of 100 tokens
    assert units_that_fit(Small(), [lease(10, 64)]) == 1, "a group that does not fit is split"
    unbounded = cast(Any, ScriptedEngine())
    assert units_that_fit(unbounded, [lease(10, 64)]) > 100
