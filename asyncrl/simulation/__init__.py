"""The production loop on a virtual clock, with modelled engines, environments, rewards, trainer and faults.

>>> from asyncrl.simulation import Scenario, simulate
>>> result = simulate(Scenario(steps=3, groups_per_step=2))
>>> [step.at_s for step in result.steps], result.violations
([2.0, 3.0, 4.0], [])
"""

from asyncrl.simulation.clock import SimulationDeadlock, VirtualLoop, run_virtually
from asyncrl.simulation.distributions import Distribution
from asyncrl.simulation.scenario import Fault, FaultKind, Scenario
from asyncrl.simulation.schedules import random_scenario
from asyncrl.simulation.world import SimulatedStep, Simulation, simulate

__all__ = [
    "Distribution",
    "Fault",
    "FaultKind",
    "Scenario",
    "SimulatedStep",
    "Simulation",
    "SimulationDeadlock",
    "VirtualLoop",
    "random_scenario",
    "run_virtually",
    "simulate",
]
