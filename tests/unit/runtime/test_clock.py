"""Wall time that jumps, and the clock that does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.clock import ManualClock, SteadyClock, SystemClock

HOUR_S = 3600.0
MOVES = st.lists(
    st.tuples(st.sampled_from(["advance", "jump"]), st.floats(0, 100), st.booleans()).map(
        lambda move: (move[0], move[1] if move[0] == "advance" else (1 if move[2] else -1) * move[1] * 72)
    ),
    max_size=40,
)


def test_a_jump_moves_the_wall_clock_alone() -> None:
    clock = ManualClock(start_ms=1_000_000)
    clock.jump(-500)
    clock.advance(2)
    assert (clock.now_ms(), clock.monotonic_s()) == (502_000, 1002.0)


def test_without_jumps_it_is_the_wall_clock() -> None:
    wall = ManualClock()
    steady = SteadyClock(wall)
    for seconds in (0.001, 0.4, 0.0, 3.7, 86_400):
        wall.advance(seconds)
        assert steady.now_ms() == wall.now_ms()
    assert abs(SteadyClock(SystemClock()).now_ms() - SystemClock().now_ms()) < 1000


@given(MOVES)
def test_it_never_goes_back_and_measures_time_within_a_tenth(moves: list[tuple[str, float]]) -> None:
    wall = ManualClock()
    steady = SteadyClock(wall)
    for kind, seconds in moves:
        before_ms, before_s = steady.now_ms(), wall.monotonic_s()
        (wall.advance if kind == "advance" else wall.jump)(seconds)
        passed_ms = (wall.monotonic_s() - before_s) * 1000
        assert abs(steady.now_ms() - before_ms - passed_ms) <= passed_ms / 10 + 1
        assert steady.now_ms() >= before_ms


def test_it_comes_back_to_the_wall_clock_and_then_stays_with_it() -> None:
    wall = ManualClock()
    steady = SteadyClock(wall)
    wall.jump(HOUR_S)
    wall.advance(9 * HOUR_S)
    assert 0 < wall.now_ms() - steady.now_ms() < HOUR_S * 1000
    wall.advance(2 * HOUR_S)
    assert steady.now_ms() == wall.now_ms()
    wall.advance(1)
    assert steady.now_ms() == wall.now_ms()


def test_it_goes_on_from_what_an_earlier_process_wrote_down() -> None:
    wall = ManualClock()
    written_ms = wall.now_ms() + 60_000
    steady = SteadyClock(wall, not_before_ms=written_ms)
    assert steady.now_ms() == written_ms
    wall.advance(10)
    assert steady.now_ms() == written_ms + 9_000, "a tenth slower, until the wall clock has caught up"
