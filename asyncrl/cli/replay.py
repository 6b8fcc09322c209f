"""``asyncrl replay``: a recorded run is trained again, as it was or under another loss, correction or staleness law."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError

from .failure import FAILED
from .output import show

if TYPE_CHECKING:
    from asyncrl.pipeline.recording import Recording
    from asyncrl.pipeline.replay import Replayed

__all__ = ["add_replay_options", "replay_command"]

EPILOG = """
examples:
  asyncrl replay runs/calculator-20260102-030405                        the same weights, bit for bit, or exit 1
  asyncrl replay RUN --from-step 40 --set algorithm.loss=gspo           another loss, from a checkpoint on
  asyncrl replay RUN --set staleness.policy=mask --set max_staleness=0   what the fresh tokens alone would have taught
"""


def add_replay_options(command: argparse.ArgumentParser) -> None:
    """The options of ``asyncrl replay``."""
    command.epilog = EPILOG
    command.add_argument("run", type=Path, metavar="RUN", help="folder of a run that kept its ledger")
    command.add_argument(
        "--from-step", type=int, default=0, metavar="N", help="go on from its checkpoint of step N (0)"
    )
    command.add_argument("--to-step", type=int, metavar="N", help="last step to train (all that are recorded)")
    command.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="train with another setting of [algorithm], [trainer], [staleness] or max_staleness",
    )
    command.add_argument("--runs", type=Path, metavar="DIR", help="where the replay makes its folder (beside RUN)")
    command.add_argument(
        "--dry-run", action="store_true", help="say what is recorded and what is missing, train nothing"
    )
    command.add_argument("--json", action="store_true", help="print the outcome as JSON")


def replay_command(namespace: argparse.Namespace) -> int:
    """``asyncrl replay``: 1 if a replay with nothing changed ends in other weights."""
    from asyncrl.pipeline.recording import Recording

    settings: dict[str, str] = {}
    for setting in namespace.settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            remedy = "write --set algorithm.loss=gspo"
            raise ConfigError(f"--set {setting!r} is no setting", path="--set", remedy=remedy)
        settings[key.replace("-", "_")] = value
    with Recording(namespace.run) as recording:
        if namespace.dry_run:
            return _tell_recording(recording, namespace)
        from asyncrl.pipeline.replay import replay

        done = replay(
            recording,
            settings,
            from_step=namespace.from_step,
            to_step=namespace.to_step,
            runs=namespace.runs,
            progress="none" if namespace.json else recording.config.telemetry.progress,
        )
    show(json.dumps(_record(done), indent=2) if namespace.json else _told(done))
    return 0 if done.forked or done.equal else FAILED


def _tell_recording(recording: Recording, namespace: argparse.Namespace) -> int:
    lacks = recording.lacks(namespace.from_step, namespace.to_step)
    checkpoints = ", ".join(map(str, recording.checkpoints)) or "none"
    told = [
        f"steps {recording.first_step + 1}..{recording.last_step} are recorded; checkpoints: {checkpoints}",
        *(f"missing: {sentence}" for sentence in lacks),
    ]
    if namespace.json:
        record = {"first_step": recording.first_step, "last_step": recording.last_step, "lacks": list(lacks)}
        show(json.dumps(record | {"checkpoints": list(recording.checkpoints)}, indent=2))
    else:
        show("\n".join(told if lacks else [*told, "nothing is missing"]))
    return FAILED if lacks else 0


def _told(done: Replayed) -> str:
    steps = f"steps {done.from_step + 1}..{done.to_step}"
    if done.forked:
        where = "never" if done.first_difference is None else f"at step {done.first_difference}"
        told = f"{steps} with another {', '.join(done.forked)}: left the recorded weights {where}"
    elif done.equal:
        told = f"{steps}: the recorded weights, bit for bit, after each of them"
    elif done.first_difference is not None:
        told = f"{steps}: other weights than recorded, from step {done.first_difference} on"
    else:
        told = f"{steps}: only {done.compared} of them have recorded weights to be held against"
    return f"{told}\nweights {done.weights} in {done.run}"


def _record(done: Replayed) -> dict[str, object]:
    return {
        "run": str(done.run),
        "from_step": done.from_step,
        "to_step": done.to_step,
        "forked": list(done.forked),
        "compared": done.compared,
        "equal": done.equal,
        "first_difference": done.first_difference,
        "weights": done.weights,
    }
