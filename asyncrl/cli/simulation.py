"""``asyncrl simulate`` and ``asyncrl plan``: a run that is only planned, on a virtual clock."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError

from .output import show

if TYPE_CHECKING:
    from asyncrl.simulation.forecast import Forecast

__all__ = ["add_plan_options", "plan_command", "simulate_command"]

PLANNED_STEPS = 60
"""Steps that are simulated of each candidate: a plan compares, it need not be exact."""


def add_plan_options(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options of ``asyncrl plan``, besides the configuration's."""
    devices = command.add_argument(
        "--devices", type=_devices, metavar="N", help="devices to split (as many as the configuration uses)"
    )
    return [devices, command.add_argument("--json", action="store_true", help="print the candidates as JSON")]


def simulate_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl simulate``."""
    from asyncrl.simulation.forecast import forecast, scenario_of

    config = _configuration(namespace, settings)
    if namespace.dry_run:
        show(config.to_toml().rstrip("\n"))
        return 0
    outlook = forecast(scenario_of(config))
    show(json.dumps(_record(outlook), indent=2) if namespace.json else _told(outlook))
    return 0


def plan_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl plan``."""
    from asyncrl.simulation.forecast import best_of, scenario_of, search

    config = _configuration(namespace, settings)
    if namespace.dry_run:
        show(config.to_toml().rstrip("\n"))
        return 0
    scenario = scenario_of(config)
    ranks = config.trainer.world_size
    devices = namespace.devices or config.rollout.replicas + ranks
    scenario = replace(scenario, steps=min(scenario.steps, PLANNED_STEPS))
    forecasts = search(scenario, devices=devices, trainer_devices=ranks)
    best = best_of(forecasts)
    if namespace.json:
        show(json.dumps({"best": _record(best), "candidates": [_record(each) for each in forecasts]}, indent=2))
        return 0
    lines = ["replicas  trainer  max_staleness  tokens/s    step  trainer waits  replicas idle  masked  not trained on"]
    for each in forecasts:
        certificate = each.certificate
        lines.append(
            f"{each.scenario.replicas:8d}  {devices - each.scenario.replicas:7d}  {each.scenario.max_staleness:13d}  "
            f"{each.tokens_per_s:8.0f}  {_seconds(each.step_s):>6}  {sum(each.trainer_idle.values()):13.1%}  "
            f"{each.replicas_idle:13.1%}  {certificate.masked_share:6.1%}  {certificate.waste:14.1%}"
            + ("  <-- least stale within 3 % of the fastest" if each is best else "")
        )
    show("\n".join(lines))
    return 0


def _configuration(namespace: argparse.Namespace, settings: Sequence[str]) -> Any:
    from asyncrl.config import load_config

    # torch tells its own developers of a deprecated call inside torch.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    if namespace.file is None:
        raise ConfigError("no configuration given; write asyncrl COMMAND FILE.toml", remedy="give a FILE.toml")
    config = load_config(namespace.file, settings)
    if config.steps < 3:
        raise ConfigError(f"steps = {config.steps}: too few to tell anything", path="steps", remedy="at least 3")
    return config


def _told(outlook: Forecast) -> str:
    scenario, certificate = outlook.scenario, outlook.certificate
    rows = [
        ("step", _seconds(outlook.step_s)),
        ("tokens trained on", f"{outlook.tokens_per_s:,.0f} a second"),
        *((f"trainer waits for {cause}", f"{share:.1%} of the time") for cause, share in outlook.trainer_idle.items()),
        ("replicas idle", f"{outlook.replicas_idle:.1%} of their speed"),
        ("groups rolling out", f"{outlook.in_flight:.1f} of {scenario.groups_per_step} a step"),
        ("staleness policy", f"{scenario.staleness.name}, bound {scenario.max_staleness}"),
        *(
            (f"  {age} behind", f"{tokens / certificate.tokens:6.1%}  {'#' * round(24 * tokens / certificate.tokens)}")
            for age, tokens in certificate.histogram.items()
        ),
        ("masked", f"{certificate.masked_share:.1%} of the tokens of trained rollouts"),
        ("not trained on", f"{certificate.waste:.1%} of all tokens"),
        ("length, trained / issued", f"{certificate.length_ratio:.3f}"),
        ("simulated", f"{scenario.steps} steps; a model of durations, not of learning"),
    ]
    width = max(len(name) for name, _text in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _record(outlook: Forecast) -> dict[str, Any]:
    scenario, certificate = outlook.scenario, outlook.certificate
    return {
        "replicas": scenario.replicas,
        "max_staleness": scenario.max_staleness,
        "policy": scenario.staleness.name,
        "step_s": outlook.step_s,
        "tokens_per_s": outlook.tokens_per_s,
        "trainer_idle": dict(outlook.trainer_idle),
        "replicas_idle": outlook.replicas_idle,
        "groups_in_flight": outlook.in_flight,
        "staleness": {str(age): tokens for age, tokens in certificate.histogram.items()},
        "masked_share": certificate.masked_share,
        "waste": certificate.waste,
        "length_ratio": certificate.length_ratio,
    }


def _seconds(time_s: float) -> str:
    return f"{time_s:.3g} s"


def _devices(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 2 to 4096")
    return int(text)
