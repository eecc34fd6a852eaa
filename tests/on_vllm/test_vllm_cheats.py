"""What cheats of an engine come to on vLLM: the same judge, with torch's engine and the limits that are built in."""

from collections import Counter
from collections.abc import Mapping

import pytest

from kit.trial import Harness
from shoal.adversary import CHEATS, Cheat, find_cheat
from shoal.engines import Engine, build
from shoal.protocol import Outcome
from shoal.validator.profiles import BUILT_IN

KIND = "vllm/cpu/float32"
ELSEWHERE = {"branch", "loose"}  # by rewards of many groups, and in bfloat16: nothing of vLLM's
CHEATS_OF_ENGINES = sorted(name for name, cheat in CHEATS.items() if cheat.engine is not Cheat.engine)
UNITS = 60  # what a cheat needs at most, most of them two


class VllmHarness(Harness):
    """Cheats that are given vLLM, one after the other: its engines are used again, as many as one cheat asks for."""

    def __init__(self) -> None:
        super().__init__(group_size=8, profile=KIND)
        self._made: dict[tuple[bytes, int], Engine] = {}
        self._given = Counter[bytes]()

    def cheating(self, cheat: Cheat) -> Engine:
        self._given.clear()
        return super().cheating(cheat)

    def build(self, files: Mapping[str, bytes]) -> Engine:
        model = files["config.json"]
        self._given[model] += 1
        place = (model, self._given[model])
        if place not in self._made:
            self._made[place] = build("vllm", files)
        return self._made[place]


@pytest.fixture(scope="module")
def harness() -> VllmHarness:
    assert KIND in BUILT_IN
    return VllmHarness()


def test_honest_work_passes(harness):
    trial = harness.tried(Cheat(), range(UNITS))
    assert Counter(each.verdict.outcome for each in trial.judged) == {Outcome.ACCEPTED: UNITS}
    assert sum(each.tokens for each in trial.judged) > 2_000


@pytest.mark.parametrize("name", [name for name in CHEATS_OF_ENGINES if name not in ELSEWHERE])
def test_a_cheat_is_banned_for_one_of_its_reasons(harness, name, record_property):
    trial = harness.tried(find_cheat(name), range(UNITS), stop_when_banned=True)
    assert trial.until_banned() is not None
    assert {each.verdict.reason for each in trial.rejected} <= CHEATS[name].reasons
    record_property(
        "table", f"{name}: rejected and banned after (groups, tokens) {trial.until_caught()}, {trial.until_banned()}"
    )
