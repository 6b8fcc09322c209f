"""What a planned run would be like: its configuration and its modelled durations, simulated for some steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asyncrl.config import Config
from asyncrl.pipeline.certificate import Certificate, merge
from asyncrl.simulation.distributions import Distribution
from asyncrl.simulation.scenario import Scenario
from asyncrl.simulation.world import simulate

__all__ = ["Forecast", "best_of", "forecast", "scenario_of", "search"]

MOST_STEPS = 300
BOUNDS = (0, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The steady state of a simulated run.

    Attributes:
        scenario: what was simulated.
        step_s: seconds of a step.
        tokens_per_s: tokens trained on, in a second.
        trainer_idle: share of the time the trainer waits, by what it waits for.
        replicas_idle: share of the replicas' speed that nobody uses.
        in_flight: groups rolling out, on average.
        certificate: of all steps together.
    """

    scenario: Scenario
    step_s: float
    tokens_per_s: float
    trainer_idle: Mapping[str, float]
    replicas_idle: float
    in_flight: float
    certificate: Certificate


def scenario_of(config: Config) -> Scenario:
    """The run that ``config`` plans, with the durations of its ``[simulation]`` table; at most 300 steps of it."""
    model, trainer = config.simulation, config.trainer
    return Scenario(
        steps=min(config.steps, MOST_STEPS),
        groups_per_step=trainer.groups_per_step,
        group_size=trainer.group_size,
        max_staleness=config.max_staleness,
        policy=config.staleness.policy,
        tokens=Distribution.parse(model.tokens or f"uniform(1, {config.rollout.max_new_tokens})"),
        token_s=model.token_s,
        turns=model.turns,
        turn_s=Distribution.parse(model.turn_s),
        replicas=config.rollout.replicas,
        saturation=model.saturation or math.inf,
        reward_s=Distribution.parse(model.reward_s) if model.reward_s is not None else None,
        update_s=Distribution.parse(model.update_s),
        publish_s=model.publish_s,
        prepare_s=model.prepare_s,
        endless=True,
        seed=config.seed,
    )


def forecast(scenario: Scenario) -> Forecast:
    """Simulate a scenario; its first third is not counted, so that what remains is like any later stretch of the run.

    Raises:
        AssertionError: the simulation broke one of its own rules.
    """
    result = simulate(scenario)
    if result.violations:
        raise AssertionError("; ".join(result.violations[:3]))
    steps = result.steps[len(result.steps) // 3 :]
    span_s = steps[-1].at_s - steps[0].at_s
    certificate = merge(step.certificate for step in steps[1:]) if len(steps) > 1 else steps[0].certificate
    waits = result.waits_s.get("train", {})
    return Forecast(
        scenario=scenario,
        step_s=span_s / max(len(steps) - 1, 1),
        tokens_per_s=certificate.tokens / span_s if span_s else 0.0,
        trainer_idle={reason: waited_s / result.span_s for reason, waited_s in waits.items()},
        replicas_idle=1 - result.used_s / (result.span_s * scenario.replicas),
        in_flight=sum(step.pending for step in steps) / len(steps),
        certificate=certificate,
    )


def search(scenario: Scenario, *, devices: int, trainer_devices: int, bounds: Sequence[int] = BOUNDS) -> list[Forecast]:
    """Forecasts for every split of ``devices`` into rollout replicas and trainer ranks, and every bound.

    A replica takes one device. An update that takes ``update_s`` on ``trainer_devices`` takes in inverse proportion
    longer on fewer, and is as much shorter on more.
    """
    forecasts = []
    for ranks in range(1, devices):
        faster = trainer_devices / ranks
        update_s = Distribution(scenario.update_s.kind, _scaled(scenario.update_s, faster))
        split = replace(scenario, replicas=devices - ranks, update_s=update_s)
        forecasts += [forecast(replace(split, max_staleness=bound)) for bound in bounds]
    return forecasts


def best_of(forecasts: Sequence[Forecast], *, slack: float = 0.03) -> Forecast:
    """The least stale of those that train on nearly as many tokens a second as the fastest one."""
    fastest = max(each.tokens_per_s for each in forecasts)
    near = [each for each in forecasts if each.tokens_per_s >= (1 - slack) * fastest]
    return min(near, key=lambda each: (each.scenario.max_staleness, -each.tokens_per_s))


def _scaled(distribution: Distribution, factor: float) -> tuple[float, ...]:
    """Parameters of the same distribution, ``factor`` times as long."""
    if distribution.kind == "lognormal":
        mu, sigma = distribution.parameters
        return (mu + math.log(factor), sigma)
    return tuple(parameter * factor for parameter in distribution.parameters)
