"""Plants defects in driver, buffer, staleness law, publication, metering and seeds; counts those that a run notices.

    python benchmarks/planted_defects.py [--only law] [--json]

Each defect is an edit of one file: the old text must occur once, or the program ends with an error. With each, a run of
10 steps is trained and then replayed, both with the edited source, as a user of it would. A defect is noticed where one
of the two ends with an error of asyncrl's own; any other error, a hang or a failing unit test does not count. The
first run has no defect and must pass. Its world makes rollouts span versions, pass the staleness bound, and fail.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from mutants import ROOT, Mutant, Planted

STEPS = 10
GROUPS = 3
GOAL = 28
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Defect:
    what: str
    file: str  # from the repository's root
    old: str
    new: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def mutant(self) -> Mutant:
        source = (ROOT / self.file).read_text()
        if source.count(self.old) != 1:
            raise SystemExit(f"{self.file} has {source.count(self.old)} times, not once: {self.old!r} ({self.what})")
        line = source[: source.index(self.old)].count("\n") + 1
        return Mutant(self.file, line, self.old, self.new, source.replace(self.old, self.new))


DRIVER, GROUP, JOURNAL = "asyncrl/trainer/driver.py", "asyncrl/trainer/group.py", "asyncrl/trainer/journal.py"
LEARNER, WORKERS, LAW = "asyncrl/trainer/learner.py", "asyncrl/trainer/workers.py", "asyncrl/staleness.py"
ROLLOUT, EPISODE, ROWS = "asyncrl/rollout/worker.py", "asyncrl/rollout/episode.py", "asyncrl/rollout/trajectory.py"
POOL, PUBLICATION, STATE = "asyncrl/rollout/pool.py", "asyncrl/rollout/publication.py", "buffers/state.py"
GENERATION, SHADOW = "engines/rollout/transformers/generation.py", "engines/rollout/transformers/weights.py"
SEEDS = 'seeds=[derive_seed(self.seed, "train", group_id, row) for row in range(self.group_size)],'
WORLD = {"groups": STEPS * GROUPS, "waits": [0, 3, 0, 7, 10]}
WAIT = {
    "staleness": {"policy": "wait"},
    "env": {"name": "digits_world:UnevenFactory", "options": WORLD | {"waits": [0, 3, 0, 0, 4]}},
}
SCORED = {"reward": {"source": "function", "options": {"function": "digits_world:text_score", "deterministic": True}}}

DEFECTS = (
    # seeds
    Defect("seed: a prompt's seeds depend on the version", GROUP, SEEDS, SEEDS.replace("row)", "row, self.version())")),
    Defect("seed: all rows of a group share one", GROUP, SEEDS, SEEDS.replace("group_id, row)", "group_id, 0)")),
    Defect("seed: the run's seed is left out", GROUP, SEEDS, SEEDS.replace("self.seed", "0")),
    # staleness law
    Defect(
        "law: admission one version too far",
        LAW,
        "self._version_of_next() - self._version <= self.max_staleness\n",
        "self._version_of_next() - self._version <= self.max_staleness + 1\n",
    ),
    Defect(
        "law: admission one version too far, where training waits",
        LAW,
        "self._version_of_next() - self._version <= self.max_staleness\n",
        "self._version_of_next() - self._version <= self.max_staleness + 1\n",
        WAIT,
    ),
    Defect(
        "law: the mask begins one version too low",
        LAW,
        "return max(0, trainer_version - max_staleness) if",
        "return max(0, trainer_version - max_staleness - 1) if",
    ),
    Defect(
        "law: the certificate counts every token one version younger",
        LAW,
        "histogram[trainer_version - version] += count",
        "histogram[max(0, trainer_version - version - 1)] += count",
    ),
    Defect(
        "law: the driver says a version is served before the engines hold it",
        DRIVER,
        "            ended = await self.stages.pool.publish(weights)\n",
        "            self.law.published(version)\n            self._admission_changed.set()\n"
        "            ended = await self.stages.pool.publish(weights)\n",
    ),
    # publication
    Defect(
        "publication: every fourth is skipped",
        DRIVER,
        "            ended = await self.stages.pool.publish(weights)\n            self._rebase = bool(ended.fenced)\n",
        "            if version % 4:\n                await self.stages.pool.publish(weights)\n",
    ),
    Defect(
        "publication: every fourth is skipped, and the law is not told",
        DRIVER,
        '            publication = tasks.create_task(self._publish(tasks, step, manifest), name=f"publish {step}")\n',
        "            if step % 4 == 0 and step < self.plan.steps:\n"
        "                publication = None\n                await manifest\n                continue\n"
        '            publication = tasks.create_task(self._publish(tasks, step, manifest), name=f"publish {step}")\n',
    ),
    Defect(
        "publication: the weights of the step before",
        WORKERS,
        "        tensors, adapter = self._published(sharded=self._divided)\n        manifest = None\n",
        "        tensors, adapter = self._published(sharded=self._divided)\n"
        "        now = [(name, tensor.clone()) for name, tensor in tensors]\n"
        '        tensors, self._before = getattr(self, "_before", now), now\n'
        "        manifest = None\n",
    ),
    Defect(
        "publication: an engine takes the number without the weights",
        SHADOW,
        "            live.data = tensor\n        self._shadow.tensors.clear()",
        "            pass\n        self._shadow.tensors.clear()",
    ),
    Defect(
        "publication: an engine keeps one tensor of the version before",
        SHADOW,
        "            live.data = tensor\n        self._shadow.tensors.clear()",
        '            live.data = live.data if "down_proj" in owner else tensor\n        self._shadow.tensors.clear()',
    ),
    Defect(
        "publication: an engine keeps the weights of every fourth version to itself",
        SHADOW,
        "            live.data = tensor\n        self._shadow.tensors.clear()",
        "            live.data = live.data if version % 4 == 3 else tensor\n        self._shadow.tensors.clear()",
    ),
    Defect(
        "publication: a tensor is changed after it was verified",
        SHADOW,
        "            self.prepared = version\n        finally:",
        '            owner = next(name for name in self._shadow.tensors if "norm" in name)\n'
        "            self._shadow.tensors[owner] = self._shadow.tensors[owner] * 1.0001\n"
        "            self.prepared = version\n        finally:",
    ),
    # stamps of tokens
    Defect(
        "stamp: a token's version is one too low",
        GENERATION,
        "row.append(token, log_prob, version, top)",
        "row.append(token, log_prob, max(0, version - 1), top)",
    ),
    Defect(
        "stamp: a token's version is one too high, in later turns",
        EPISODE,
        "        self._versions += generation.weight_versions\n",
        "        self._versions += [each + bool(self._turns) for each in generation.weight_versions]\n",
    ),
    Defect(
        "stamp: the whole row has the version of its first token",
        EPISODE,
        "            weight_versions=tuple(self._versions),\n",
        "            weight_versions=tuple(\n"
        "                min(v for v in self._versions if v >= 0) if v >= 0 else -1 for v in self._versions\n"
        "            ),\n",
    ),
    Defect(
        "stamp: a header says that all tokens are of the newest version",
        ROWS,
        "        version_tokens=dict(sorted(versions.items())),\n",
        "        version_tokens={max(versions): versions.total()},\n",
    ),
    # buffer
    Defect(
        "buffer: a group is trained on twice",
        STATE,
        "            if held.uses < self.max_uses:\n",
        "            if held.uses < self.max_uses + (held.summary.group_id % 5 == 0):\n",
    ),
    Defect(
        "buffer: a group is lost",
        STATE,
        "        group.held = replace(group.held, summary=summary, rows=rows)\n        group.parts.clear()\n",
        "        group.held = replace(group.held, summary=summary, rows=rows)\n        group.parts.clear()\n"
        "        if summary.group_id == 7:\n            return\n",
    ),
    Defect(
        "buffer: gives rows of another group",
        STATE,
        "        return tuple(taken)\n\n    def make_room",
        "        others = [*taken[1:], taken[0]]\n"
        "        return tuple(replace(held, rows=other.rows) for held, other in zip(taken, others, strict=True))\n"
        "\n    def make_room",
    ),
    Defect(
        "buffer: a later group is taken before an earlier one, where training waits",
        STATE,
        "            chosen = self._selection.choose(groups, weight_version=weight_version)\n",
        "            chosen = self._selection.choose(groups, weight_version=weight_version)\n"
        "            ready = [each for each in self._groups if self.stage(each) is Stage.READY]\n"
        "            later = [each for each in ready if each > max(chosen or [0])]\n"
        "            chosen = [*chosen[:-1], later[0]] if chosen and later else chosen\n",
        WAIT,
    ),
    # rewards, advantages and other columns
    Defect(
        "rollout: each row of a group has the reward of the next one",
        ROLLOUT,
        "        batch = trajectories_to_batch(trajectories, group_id=group_id)\n",
        "        from dataclasses import replace as renewed\n"
        "        earned = [(each.reward, each.turns) for each in trajectories]\n"
        "        trajectories = [\n"
        "            renewed(each, reward=reward, turns=tuple(\n"
        "                renewed(turn, reward=other.reward) for turn, other in zip(each.turns, turns, strict=False)\n"
        "            ))\n"
        "            for each, (reward, turns) in zip(trajectories, earned[1:] + earned[:1], strict=True)\n"
        "        ]\n"
        "        batch = trajectories_to_batch(trajectories, group_id=group_id)\n",
    ),
    Defect(
        "rollout: every fourth group has rewards of an earlier one",
        ROLLOUT,
        "        batch = trajectories_to_batch(trajectories, group_id=group_id)\n",
        "        batch = trajectories_to_batch(trajectories, group_id=group_id)\n"
        '        earlier = getattr(self, "_earlier", None)\n'
        '        self._earlier = (batch.batch["rewards"], batch.meta_info["summary"]["rewards"])\n'
        "        if group_id % 4 == 3 and earlier is not None and len(earlier[1]) == len(trajectories):\n"
        '            batch.batch["rewards"], batch.meta_info["summary"]["rewards"] = earlier\n',
    ),
    Defect(
        "episode: a turn is rewarded for the reply before it",
        EPISODE,
        '                returned = await _call(environment.step, reply, what="step", deadline_s=left_s)\n',
        "                before = messages[-2] if number else reply\n"
        '                returned = await _call(environment.step, before, what="step", deadline_s=left_s)\n',
    ),
    Defect(
        "reward model: scores are given to the wrong rows",
        GROUP,
        '            return scores, tuple(await fetch_numbers(scores, "scores"))\n',
        "            if (await scores.header()).rows == self.group_size:\n"
        "                scores = scores.reorder([*range(1, self.group_size), 0])\n"
        '            return scores, tuple(await fetch_numbers(scores, "scores"))\n',
        SCORED,
    ),
    Defect(
        "learner: rewards are given to the wrong groups",
        LEARNER,
        "        rewards = [reward for summary in summaries for reward in summary.rewards]\n        group_ids",
        "        others = [*summaries[1:], summaries[0]]\n"
        "        rewards = [reward for summary in others for reward in summary.rewards]\n        group_ids",
    ),
    Defect(
        "learner: advantages of another group",
        LEARNER,
        "        advantages = self.advantages.of(groups)\n",
        "        advantages = self.advantages.of([*groups[1:], groups[0]])\n",
    ),
    Defect(
        "learner: advantages are shifted by one group after they were computed",
        LEARNER,
        '"advantages": self.estimator(columns), **own',
        '"advantages": self.estimator(columns).roll(groups[0].known.rows), **own',
    ),
    Defect(
        "worker: a stale token is weighted by the wrong version",
        WORKERS,
        "        metrics = engine.update(with_staleness(young, version=self._version))\n",
        "        metrics = engine.update(with_staleness(young, version=max(0, self._version - 1)))\n",
    ),
    Defect(
        "worker: tokens past the bound are trained on",
        WORKERS,
        "young = batch if oldest_version is None else mask_stale_tokens(batch, oldest_version)\n        if",
        "young = batch\n        if",
    ),
    Defect(
        "episode: the log-probs of a later turn are those of the turn before",
        EPISODE,
        "        self._log_probs += generation.log_probs\n",
        "        before = [each for each, mine in zip(self._log_probs, self._mask, strict=False) if mine]\n"
        "        self._log_probs += (before + list(generation.log_probs))[: len(generation.log_probs)]\n",
    ),
    # metering
    Defect(
        "meter: undercounts",
        ROLLOUT,
        "self._meter.count(self._account, len(chunk.token_ids))",
        "self._meter.count(self._account, len(chunk.token_ids) - (chunk.finish_reason is not None))",
    ),
    Defect(
        "meter: tokens of episodes that failed are left out",
        ROLLOUT,
        "                account.wasted += max(",
        "                account.wasted += 0 * max(",
    ),
    Defect(
        "journal: tokens of dropped groups are not counted",
        JOURNAL,
        "        self.drop_tokens(group.reason, group.tokens)\n",
        "",
    ),
)


def tables(folder: Path, settings: dict[str, Any]) -> str:
    """The configuration of a run, as TOML."""
    from asyncrl.config import Config

    return Config.from_mapping(
        {
            "name": "planted",
            "steps": STEPS,
            "max_staleness": 2,
            "seed": 7,
            "runs": str(folder),
            "cluster": {"backend": "local"},
            "model": {
                "source": "scratch",
                "options": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128},
            },
            "env": {"name": "digits_world:UnevenFactory", "options": WORLD},
            "rollout": {"max_new_tokens": 6, "max_seq_len": 64},
            "trainer": {"groups_per_step": GROUPS, "group_size": 4, "lr": 1e-2},
            "eval": {"tasks": 0},
            "checkpoint": {"every": 0},
            "telemetry": {"progress": "none"},
            **settings,
        }
    ).to_toml()


def called(
    mutant: Mutant | None, arguments: list[str], folder: Path, settings: dict[str, Any]
) -> tuple[int | str, str]:
    """In a forked process with this defect: the exit status of a command (or what became of it), and its last words."""
    log = folder / "log"
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setpgid(0, 0)
            with log.open("wb") as out:
                for stream in (1, 2):
                    os.dup2(out.fileno(), stream)
            if mutant is not None:
                sys.meta_path.insert(0, Planted(mutant))
            from asyncrl.cli.main import main

            (folder / "run.toml").write_text(tables(folder, settings))
            status = main(arguments)
        except BaseException:  # noqa: BLE001  the parent reads the status and the log
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    ends = time.monotonic() + DEADLINE_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > ends:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs", log.read_text()
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1]), log.read_text(errors="replace")


def judged(what: str, mutant: Mutant | None, settings: dict[str, Any]) -> dict[str, Any]:
    """What a run with the defect, or its replay, says."""
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    found: dict[str, Any] = {"defect": what, "noticed": False, "by": "", "words": ""}
    try:
        for command in ("train", "replay"):
            arguments = ["train", str(folder / "run.toml")]
            if command == "replay":
                (run,) = folder.glob("planted-2*")
                arguments = ["replay", str(run)]
            status, log = called(mutant, arguments, folder, settings)
            if status != 0:
                words = [line for line in log.splitlines() if line.strip()]
                told = next((line for line in words if re.search(r"error:|other weights|Error", line)), "")
                named = status == 1 and "not one of asyncrl's own errors" not in log
                return found | {"noticed": named, "by": command, "status": status, "words": told or log[-500:]}
        return found
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="defects whose description contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    paths = [str(ROOT), str(ROOT / "benchmarks")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    for slow_to_import in ("numpy", "torch", "transformers", "pydantic", "msgspec", "safetensors.torch"):
        importlib.import_module(slow_to_import)
    import torch

    torch.set_num_threads(1)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    assert not any(name.startswith("asyncrl") for name in sys.modules), "the defect would come too late"
    chosen = [defect for defect in DEFECTS if arguments.only in defect.what]
    assert all(defect.mutant for defect in DEFECTS)  # every text is found before anything is run
    for settings in ({}, WAIT, SCORED):
        control = judged("none", None, settings)
        if control["by"]:
            print(f"a run without a defect fails: {control}", file=sys.stderr)
            return 1
    found = []
    for defect in chosen:
        found.append(judged(defect.what, defect.mutant, defect.settings))
        if not arguments.json:
            said = found[-1]
            verdict = f"noticed by {said['by']}" if said["noticed"] else f"NOT NOTICED {said.get('status', '')}"
            print(f"{defect.what}: {verdict}: {said['words']}", flush=True)
    noticed = sum(each["noticed"] for each in found)
    figures = {"defects": len(found), "noticed": noticed, "goal": GOAL, "holds": noticed >= GOAL}
    print(json.dumps({"figures": figures, "defects": found}) if arguments.json else figures)
    return 0 if noticed >= min(GOAL, len(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
