"""A fleet without machines: the real hub (services, decisions, SQLite in memory) under a manual clock (`world`), and
actors who do to it what processes would (`simulation`).

Everything follows from the scenario's seed: the same scenario gives the same ledger, hash for hash. What is left out is
the network between actors and hub: requests are not signed, and none is lost.
"""

from shoal.simulator.invariants import problems
from shoal.simulator.simulation import Simulation
from shoal.simulator.world import Scenario, SimulationResult, WorkerKind, World

__all__ = ["Scenario", "Simulation", "SimulationResult", "WorkerKind", "World", "problems"]
