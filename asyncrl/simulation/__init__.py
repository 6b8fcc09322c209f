"""The production loop on a virtual clock, with models of engines, environments, rewards, trainer and faults.

>>> from asyncrl.simulation import Scenario, simulate
>>> result = simulate(Scenario(steps=3, groups_per_step=2))
>>> [step.at_s for step in result.steps], result.violations
([2.0, 3.0, 4.0], [])
"""

from asyncrl.simulation.model import Distribution, Fault, FaultKind, Scenario
from asyncrl.simulation.world import SimulatedStep, Simulation, simulate
from asyncrl.testing.clock import SimulationDeadlock, VirtualLoop, run_virtually

__all__ = [
    "Distribution",
    "Fault",
    "FaultKind",
    "Scenario",
    "SimulatedStep",
    "Simulation",
    "SimulationDeadlock",
    "VirtualLoop",
    "run_virtually",
    "simulate",
]
