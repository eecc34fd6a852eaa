"""What a program in the sandbox may use."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

WALL_FACTOR = 4
WALL_GRACE_S = 5.0
TEST_COST_S = 0.01
"""Processor time that a test takes besides the program's own, generously: the clock waits for that too."""


class Limits(BaseModel):
    """Limits of one program, all of its tests together unless it says otherwise. More than these is worth 0.

    Time is processor time, so that a busy machine does not fail a good program; what it takes to start a test is not
    counted. A program that only waits is ended by the clock: after four times its processor time and five seconds more.

    >>> Limits(test_cpu_s=2).test_wall_s
    13.0
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_s: int = Field(default=10, ge=1, le=600, description="processor seconds of all tests together")
    test_cpu_s: int = Field(default=4, ge=1, le=120, description="processor seconds of one test")
    memory_mb: int = Field(default=512, ge=64, le=16_384, description="address space of the program")
    threads: int = Field(default=64, ge=1, le=1024, description="threads; other processes cannot be started at all")
    output_bytes: int = Field(default=10_000_000, ge=1, le=1_000_000_000, description="what one test may print")

    def wall_s(self, tests: int) -> float:
        """How long so many tests may take by the clock, all together."""
        return WALL_FACTOR * (self.cpu_s + TEST_COST_S * tests) + WALL_GRACE_S

    @property
    def test_wall_s(self) -> float:
        """How long one test may take by the clock."""
        return WALL_FACTOR * self.test_cpu_s + WALL_GRACE_S
