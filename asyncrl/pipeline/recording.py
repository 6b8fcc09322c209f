"""A recorded run: what it was trained on, step by step, for those who look at it or train on it again.

    recording = asyncrl.Recording("runs/calculator-20260102-030405")
    recording.trajectories("reward > 0.5 AND step <= 10")   # rows by an SQL condition, as a DataProto
    for step, batch in recording.batches():                 # batches as they were consumed, one at a time
        ...
    fork = recording.replay({"algorithm.loss": "gspo"})     # trained again, under another loss
    fork.first_difference                                   # the step at which its weights left the recorded ones

Everything is read when it is asked for; nothing here samples a token.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from asyncrl.config import Config, load_config
from asyncrl.errors import LedgerError, RecordingError
from asyncrl.interfaces import LedgerArchive
from asyncrl.ledger import Began, RecordedGroup
from asyncrl.parts import load_part
from asyncrl.pipeline.checkpoint import Checkpoints

if TYPE_CHECKING:
    from asyncrl.data import DataProto
    from asyncrl.pipeline.replay import Replayed

__all__ = ["Recording"]


class Recording:
    """Reads the folder of a run, which may still go on. Blocks where it reads.

        >>> with Recording(run) as recording:
        ...     recording.first_step, recording.last_step
        (0, 4)

    The examples of the methods are about this run: four steps of 2 groups of 4 rows, under ``max_staleness = 2``.

    Args:
        run: the folder.

    Attributes:
        path: the folder.
        config: as the run has it now.

    Raises:
        ConfigError: its configuration cannot be read.
        RecordingError: it is no run, or keeps no ledger.
    """

    def __init__(self, run: Path | str) -> None:
        self.path = Path(run)
        if not (self.path / "config.toml").is_file():
            raise RecordingError(f"{run} is no run: it has no config.toml")
        self.config = load_config(self.path / "config.toml")
        if self.config.ledger.kind is None:
            raise RecordingError(f'{run} kept no ledger, so nothing is recorded; ledger.kind = "sqlite" keeps one')
        ledger = load_part("asyncrl.ledgers", self.config.ledger.kind, path="ledger.kind")
        try:
            self._archive: LedgerArchive = ledger.archive(self.path / "ledger.sqlite")
        except LedgerError as error:
            raise RecordingError(f"{run} has no ledger that can be read: {error}") from error

    def __repr__(self) -> str:
        return f"Recording({str(self.path)!r}, steps {self.first_step + 1}..{self.last_step})"

    # ------------------------------------------------------------------------------------------------- what there is

    @property
    def first_step(self) -> int:
        """Step after which the ledger begins: 0, unless an earlier one was lost.

        >>> recording.first_step
        0
        """
        return self._archive.first_step

    @property
    def last_step(self) -> int:
        """Newest step of which the batch is known.

        >>> recording.last_step
        4
        """
        return max(self._archive.batches, default=self.first_step)

    @property
    def checkpoints(self) -> Mapping[int, Path]:
        """Checkpoints that the run still has, by step: from each of them it can be replayed.

        >>> recording.checkpoints[4].name
        'step-000004'
        """
        found = Checkpoints(self.path / "checkpoints", keep=1).all()
        return {int(path.name.removeprefix("step-")): path for path in found}

    @property
    def weights(self) -> Mapping[int, str]:
        """Fingerprints of the weights it made, by version: what a replay is held to.

        >>> {type(fingerprint) for fingerprint in recording.weights.values()}
        {<class 'str'>}
        """
        return self._archive.weights

    def life(self, step: int) -> Began:
        """The process that trained ``step``: its configuration, and the model it was built from.

            >>> recording.life(3).step  # it began after this one
            0

        Raises:
            RecordingError: it is not known.
        """
        found = [life for life in self._archive.lives if life.step < step]
        if not found:
            raise RecordingError(f"{self.path}: the configuration that step {step} was trained under is not recorded")
        return found[-1]

    def config_of(self, step: int) -> Config:
        """The configuration that ``step`` was trained under; a resumed run may have changed it on the way.

            >>> recording.config_of(3).max_staleness
            2

        Raises:
            ConfigError: it is of another version of this program, and not valid now.
            RecordingError: it is not known.
        """
        return Config.from_mapping(tomllib.loads(self.life(step).config), origin=f"{self.path}, step {step}")

    def model_of(self, step: int) -> str:
        """Folder or hub id of the model that the policy of ``step`` was built from.

            >>> Path(recording.model_of(3)).is_dir()
            True

        Raises:
            RecordingError: it is not known.
        """
        name = self.life(step).model
        inside = self.path / name
        return str(inside) if inside.is_dir() else name

    def lacks(self, from_step: int = 0, to_step: int | None = None) -> tuple[str, ...]:
        """What keeps the steps after ``from_step``, up to ``to_step``, from being replayed, in sentences.

        >>> recording.lacks()
        ()
        >>> recording.lacks(to_step=7)
        ('there are no steps 1..7: steps 1..4 are recorded',)
        """
        last = self.last_step if to_step is None else to_step
        return tuple(self._lacks(from_step, last))

    def _lacks(self, from_step: int, last: int) -> Iterator[str]:
        archive = self._archive
        for problem in archive.problems:
            yield f"the ledger is damaged: {problem}"
        if not archive.lives:
            yield "the ledger does not say under which configuration it was trained"
        if not 0 <= from_step < last <= self.last_step:
            recorded = f"steps {self.first_step + 1}..{self.last_step} are recorded"
            yield f"there are no steps {from_step + 1}..{last}: {recorded}"
            return
        unknown = [step for step in range(from_step + 1, last + 1) if step not in archive.batches]
        if unknown:
            yield f"the batches of {len(unknown)} steps are not known, the first of step {unknown[0]}"
        missing = set(archive.missing_rows())
        bare = [step for step, slots in archive.batches.items() if from_step < step <= last and missing & {*slots}]
        if bare:
            yield f"the rows of {len(bare)} steps are not there, the first of step {bare[0]}"
        if from_step and from_step not in self.checkpoints:
            kept = ", ".join(map(str, self.checkpoints)) or "none"
            yield f"there is no checkpoint of step {from_step} (there are: {kept}); checkpoint.keep keeps more"
        if archive.lives and not unknown:
            life = self.life(from_step + 1)
            local = life.model.startswith(("/", ".", "~", "model", "checkpoints/"))
            if local and not Path(self.model_of(from_step + 1)).is_dir():
                yield f"the model it began with is not there: {life.model}"

    # ---------------------------------------------------------------------------------------------------------- rows

    def trajectories(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """Trajectories for which an SQL condition on the ledger's view ``rows`` holds; ``:name`` is a parameter in it.

        A batch of as many rows, or of the first ``limit``, with the trajectory columns of :mod:`asyncrl.interfaces`.

            >>> len(recording.trajectories("step = :step", {"step": 3}))
            8
            >>> len(recording.trajectories("step > 1", limit=5))
            5

        Raises:
            LedgerError: the condition is none.
        """
        return self._archive.query(where, parameters, limit=limit)

    def groups(self, step: int) -> tuple[RecordedGroup, ...]:
        """What ``step`` was trained on, in the order of its batch.

            >>> [len(group.rows) for group in recording.groups(3)]
            [4, 4]

        Raises:
            RecordingError: that is not recorded, or cannot be read.
        """
        slots = self._archive.batches.get(step)
        if slots is None:
            raise RecordingError(f"{self.path}: the batch of step {step} is not recorded")
        groups = []
        for slot in slots:
            group = self._archive.group(slot)
            if group is None:
                raise RecordingError(f"{self.path}: the rows of prompt {slot} of step {step} cannot be read")
            groups.append(group)
        return tuple(groups)

    def batch(self, step: int) -> DataProto:
        """The rows that ``step`` was trained on, in order: the trajectory columns of :mod:`asyncrl.interfaces`.

        ``rewards`` are those that counted: a reward model's, if there was one. ``slot`` and ``row`` tell groups apart;
        ``advantages`` follow from both (:attr:`asyncrl.config.AlgorithmConfig.advantage`).

            >>> recording.batch(3).batch["rewards"].shape
            torch.Size([8])

        Raises:
            RecordingError: as :meth:`groups`.
        """
        import torch

        from asyncrl.data import DataProto

        parts = []
        for group in self.groups(step):
            rows = group.rows.select(meta_info_keys=[])
            rows.pop(["rewards"])
            parts.append(rows.union(DataProto.from_dict({"rewards": torch.tensor(group.summary.rewards)})))
        return DataProto.concat(parts)

    def batches(self, from_step: int | None = None, to_step: int | None = None) -> Iterator[tuple[int, DataProto]]:
        """Steps after ``from_step``, up to ``to_step``, each with its batch; one batch is in memory at a time.

            >>> [(step, len(batch)) for step, batch in recording.batches(to_step=2)]
            [(1, 8), (2, 8)]

        Raises:
            RecordingError: as :meth:`groups`.
        """
        first = self.first_step if from_step is None else from_step
        for step in range(first + 1, (self.last_step if to_step is None else to_step) + 1):
            yield step, self.batch(step)

    # -------------------------------------------------------------------------------------------------------- replay

    def replay(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        from_step: int = 0,
        to_step: int | None = None,
        runs: Path | str | None = None,
        progress: str = "none",
    ) -> Replayed:
        """Train again on the recorded batches: :func:`asyncrl.pipeline.replay.replay`. Blocks; works in notebooks.

            >>> recording.replay(to_step=1).equal
            True

        Raises:
            ConfigError: a setting is none, or decided what was sampled.
            RecordingError: steps cannot be replayed, and what they lack.
        """
        from asyncrl.pipeline.replay import replay

        return replay(
            self,
            settings or {},
            from_step=from_step,
            to_step=to_step,
            runs=Path(runs) if runs is not None else None,
            progress=progress,
        )

    def close(self) -> None:
        """Close the ledger. Idempotent.

        >>> Recording(run).close()
        """
        self._archive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
