"""kill -9 in the middle of an evaluation, in a process of its own: what was written down counts, the rest is redone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kit.evaluation import SAMPLING, SortingEngine, evaluation
from shoal.evaluation.job import TASKS, evaluate
from shoal.evaluation.records import PROGRESS
from shoal.rewards import DirectScorer
from shoal.runtime.stop import StopToken

CHILD = """
import sys
from pathlib import Path
from kit.evaluation import SortingEngine, evaluation
from shoal.evaluation.job import evaluate
from shoal.rewards import DirectScorer
from shoal.runtime.stop import StopToken

class Stuck(SortingEngine):
    def generate(self, requests, proof=None):
        if len(self.asked) >= int(sys.argv[2]):
            print("stuck", flush=True)
            sys.stdin.read()  # until it is killed
        return super().generate(requests, proof)

given = evaluation(engine=Stuck())
evaluate(given, lambda: DirectScorer(given.chosen.environment), Path(sys.argv[1]), StopToken())
"""


@pytest.mark.parametrize("drawn", [4, 8])
def test_killed_and_gone_on_gives_the_same_file(tmp_path: Path, drawn: int) -> None:
    whole = evaluation()
    evaluate(whole, lambda: DirectScorer(whole.chosen.environment), tmp_path / "whole", StopToken())
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "killed"), str(drawn)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
    kept = (tmp_path / "killed" / PROGRESS).read_bytes().count(b'"drawn"')
    assert kept == drawn // SAMPLING.tasks_per_batch  # whatever was drawn, scored or not
    engine = SortingEngine()
    again = evaluation(engine=engine)
    evaluate(again, lambda: DirectScorer(again.chosen.environment), tmp_path / "killed", StopToken())
    assert len(engine.asked) == SAMPLING.tasks - kept * SAMPLING.tasks_per_batch
    assert (tmp_path / "killed" / TASKS).read_bytes() == (tmp_path / "whole" / TASKS).read_bytes()
