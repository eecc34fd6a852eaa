"""A scenario, played: the world and everybody in it."""

from __future__ import annotations

from pathlib import Path

from shoal.simulator.scenario import Scenario
from shoal.simulator.trusted import SimulatedTrainer, SimulatedValidator
from shoal.simulator.workers import SimulatedWorker
from shoal.simulator.world import SimulationResult, World


class Simulation:
    """One run of `scenario`. `folder` holds the run's secret and nothing else.

    >>> import tempfile; from shoal.simulator import WorkerKind
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Simulation(Path(folder), Scenario(crews=(WorkerKind(8, group_s=10),), seconds=120)).run().steps > 0
    True
    """

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.world = World(folder, scenario)
        self.trainer = SimulatedTrainer(self.world)
        self.validators = [SimulatedValidator(self.world, number) for number in range(scenario.validators)]
        self.workers = [SimulatedWorker(self.world, crew) for crew in scenario.crews for _ in range(crew.count)]
        self.world.at(0, self.trainer.arrive)
        for validator in self.validators:
            self.world.at(0, validator.arrive)
        for worker in self.workers:
            self.world.at(self.world.random.uniform(0, scenario.arrive_s), worker.arrive)

    def run(self) -> SimulationResult:
        """Until the scenario's time is over or the last step is trained."""
        return self.world.run(lambda: self.trainer.finished)
