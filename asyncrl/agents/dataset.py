"""Rows of a data set as tasks: one prompt, one answer, and a rule that judges it.

Files in verl's columns work unchanged (:mod:`asyncrl.datasets`); rules go by the row's ``data_source``
(:mod:`asyncrl.rewards`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from asyncrl.datasets import Dataset, PromptRow, Stream, open_conversations, open_dataset, open_prompts, read_prompt
from asyncrl.datasets.source import check_files
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import FittedPrompts, Message, Step, Task, Tool
from asyncrl.rewards.rule import Answer
from asyncrl.rewards.rulebook import Rulebook
from asyncrl.rollout.trajectory import REWARD_PARTS

__all__ = ["DatasetEnvironment", "DatasetFactory"]

_log = logging.getLogger(__name__)
_KEY = "env.options"


class DatasetEnvironment:
    """One prompt, one answer."""

    def __init__(self, rules: Rulebook) -> None:
        self._rules = rules
        self._task: Task | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        return ()

    async def reset(self, task: Task) -> Sequence[Message]:
        self._task = task
        return list(task["prompt"])

    async def step(self, reply: Message) -> Step:
        if self._task is None:
            raise EnvironmentFailure("step before reset: the environment has no task")
        task = self._task
        answer = Answer(
            data_source=task["data_source"],
            solution_str=str(reply.get("content") or ""),
            ground_truth=task["ground_truth"],
            extra_info=task["extra_info"],
            prompt=task["prompt"],
        )
        verdict = await self._rules.judge(answer)
        return Step(reward=verdict.score, done=True, info={REWARD_PARTS: dict(verdict.parts)})

    async def close(self) -> None:
        self._task = None


class DatasetFactory:
    """Tasks are the rows of files; the first task reads them (:meth:`fit_prompts` before it, off the event loop).

    Args:
        files: a path, a pattern, a folder, ``hub:owner/name?split=train``, or several of them. May be left out where
            there is ``held_out``: then there is nothing to train on.
        sources: instead of ``files``, tables with ``files``, ``weight``, ``order``, ``first_by``, ``limit``,
            ``columns`` and ``name``: a mixture (:class:`asyncrl.datasets.SourceConfig`).
        held_out: files of the held-out split, each row once, in their order. Rows of the training files whose prompt
            stands there too are left out and counted.
        held_out_share: without ``held_out``, the share of the training rows that is, by hash of the prompt.
        columns: columns that are called otherwise in ``files`` and ``held_out``: ``{prompt = "extra_info.text"}``.
        order: ``shuffled``, every pass anew by seed, or ``file``.
        system: message put before prompts that have no system message of their own.
        reward: the rule of all rows, or of those that ``rewards`` has none for: a name, ``package.module:function``,
            ``path/to/file.py:function``, a table with options, or a list of tables with weights.
        rewards: rules by data source; patterns with ``*`` may stand for many.
        max_prompt_tokens: longer prompts are left out and counted; those that fill a trajectory always are.
        demonstrations: files of conversations for a supervised warm start.
        seed: of order and mixture.

    Raises:
        ConfigError: a value that cannot be used, or a file that is not there.
    """

    def __init__(
        self,
        *,
        files: str | list[str] | None = None,
        sources: list[dict[str, Any]] | None = None,
        held_out: str | list[str] | None = None,
        held_out_share: float = 0.0,
        columns: dict[str, str] | None = None,
        order: Literal["shuffled", "file"] = "shuffled",
        system: str = "",
        reward: Any = None,
        rewards: dict[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        demonstrations: str | list[str] | None = None,
        seed: int = 0,
    ) -> None:
        if (files is not None and sources is not None) or (files is None and sources is None and held_out is None):
            raise ConfigError(
                "a dataset needs either files or sources, or at least held_out",
                path=_KEY,
                remedy='files = "train.parquet", or [[env.options.sources]] tables with files and weight',
            )
        if not 0.0 <= held_out_share < 1.0:
            raise ConfigError(
                f"held_out_share is {held_out_share}", path=f"{_KEY}.held_out_share", remedy="a share below 1"
            )
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise ConfigError(
                f"max_prompt_tokens is {max_prompt_tokens}", path=f"{_KEY}.max_prompt_tokens", remedy="1 or more"
            )
        for name, given in (("files", files), ("held_out", held_out), ("demonstrations", demonstrations)):
            if given is not None:
                check_files(given, key=f"{_KEY}.{name}")
        self._written: Any = sources
        if files is not None:
            self._written = [{"files": files, "columns": dict(columns or {}), "order": order}]
        self._held_out_files = held_out
        self._held_out_share = held_out_share
        self._columns = columns or {}
        self._system = system
        self._max_prompt_tokens = max_prompt_tokens
        self._demonstrations = demonstrations
        self._seed = seed
        self._rules = Rulebook(reward, rewards, key=_KEY)
        self._reading = threading.Lock()
        self._read_once = False
        self._train: Stream[PromptRow] | None = None
        self._held_out: _HeldOut | None = None
        self._conversations: Callable[[int], Sequence[Message]] | None = None

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        train, held_out = self._splits()
        if split == "train" and train is not None:
            return self._task(train[index])
        if split == "train":
            raise ConfigError(
                "there is no row to train on", path=f"{_KEY}.files", remedy='give files, such as "train.parquet"'
            )
        if held_out is None or not len(held_out):
            raise ConfigError(
                "there is no held-out row to evaluate on",
                path=f"{_KEY}.held_out",
                remedy='give files (held_out = "test.parquet"), a held_out_share, or eval.tasks = 0',
            )
        return self._task(held_out[index % len(held_out)])

    def make(self) -> DatasetEnvironment:
        return DatasetEnvironment(self._rules)

    def demonstration(self, index: int) -> list[Message]:
        with self._reading:
            if self._conversations is None:
                if self._demonstrations is None:
                    raise ConfigError(
                        "this dataset has no demonstrations",
                        path=f"{_KEY}.demonstrations",
                        remedy="give files of conversations, or start from a pretrained model without a warm start",
                    )
                stream = open_conversations(self._demonstrations, seed=self._seed, key=f"{_KEY}.demonstrations")
                stream.check()
                self._conversations = lambda number: stream[number].messages
        return list(self._conversations(index))

    def fit_prompts(self, count_tokens: Callable[[Sequence[Message]], int], *, below: int) -> FittedPrompts:
        """Leave out prompts of ``below`` tokens or more, and of more than ``max_prompt_tokens``. Reads every row.

        Raises:
            ConfigError: no row is left.
        """
        train, held_out = self._splits()
        most = below - 1 if self._max_prompt_tokens is None else min(below - 1, self._max_prompt_tokens)

        def fits(row: PromptRow) -> bool:
            return count_tokens(self._prompt(row)) <= most

        before = after = 0
        if train is not None:
            self._train = train.filtered(fits)
            before, after = train.rows, self._train.rows
        if held_out is not None:
            self._held_out = held_out.filtered(fits)
            before, after = before + len(held_out), after + len(self._held_out)
        if not after or (self._train is not None and not self._train.parts):
            raise ConfigError(
                f"each of the {before} prompts has more than {most} tokens",
                path=f"{_KEY}.max_prompt_tokens",
                remedy="raise it and rollout.max_tokens",
            )
        return FittedPrompts(kept=after, left_out=before - after, longest_tokens=most)

    @property
    def held_out_rows(self) -> int:
        """Rows of the held-out split."""
        held_out = self._splits()[1]
        return 0 if held_out is None else len(held_out)

    async def aclose(self) -> None:
        """End what the rules have started."""
        await self._rules.close()

    def _splits(self) -> tuple[Stream[PromptRow] | None, _HeldOut | None]:
        with self._reading:
            if not self._read_once:
                self._train, self._held_out = self._read()
                self._read_once = True
            return self._train, self._held_out

    def _read(self) -> tuple[Stream[PromptRow] | None, _HeldOut | None]:
        train = open_prompts(self._written, seed=self._seed, key=_KEY) if self._written is not None else None
        held_out: _HeldOut | None = None
        held_out_keys: set[bytes] = set()
        if self._held_out_files is not None:
            rows = open_dataset(self._held_out_files, read_prompt, columns=self._columns, key=f"{_KEY}.held_out")
            held_out = _HeldOut((rows, place) for place in range(len(rows)))
            held_out_keys = {row.key for row in held_out}
        elif self._held_out_share and train is not None:
            held_out = _share(train, self._is_held_out)
            held_out_keys = {row.key for row in held_out}
        # One pass over everything: what is wrong with a row is told now, and every source has its rule.
        data_sources = {row.data_source for part in (train.parts if train is not None else ()) for row in part.rows}
        data_sources |= {row.data_source for row in held_out or ()}
        self._rules.check(data_sources)
        if train is None:
            return None, held_out
        rest = train.filtered(lambda row: row.key not in held_out_keys) if held_out_keys else train
        if not rest.parts:
            raise ConfigError(
                f"all {train.rows} rows are held out", path=f"{_KEY}.held_out", remedy="give other files to train on"
            )
        if rest.rows < train.rows:
            _log.warning("%d of %d rows are held out and not trained on", train.rows - rest.rows, train.rows)
        return rest, held_out

    def _is_held_out(self, row: PromptRow) -> bool:
        return int.from_bytes(row.key[:4], "big") < self._held_out_share * 2**32

    def _prompt(self, row: PromptRow) -> list[Message]:
        if self._system and row.prompt[0]["role"] != "system":
            return [{"role": "system", "content": self._system}, *row.prompt]
        return list(row.prompt)

    def _task(self, row: PromptRow) -> Task:
        return {
            "prompt": self._prompt(row),
            "data_source": row.data_source,
            "ground_truth": row.ground_truth,
            "extra_info": dict(row.extra_info),
            "environment": row.data_source,
        }


class _HeldOut:
    """The rows of the held-out split, by their places in data sets; read when they are asked for."""

    def __init__(self, places: Iterable[tuple[Dataset[PromptRow], int]]) -> None:
        self._places = tuple(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> PromptRow:
        rows, place = self._places[number]
        return rows[place]

    def __iter__(self) -> Iterator[PromptRow]:
        return (rows[place] for rows, place in self._places)

    def filtered(self, wanted: Callable[[PromptRow], bool]) -> _HeldOut:
        return _HeldOut((rows, place) for rows, place in self._places if wanted(rows[place]))


def _share(train: Stream[PromptRow], wanted: Callable[[PromptRow], bool]) -> _HeldOut:
    """The rows of all parts for which ``wanted`` holds; one that several parts have, of one file, once."""
    places: dict[tuple[str, bytes], tuple[Dataset[PromptRow], int]] = {}
    for part in train.parts:
        for place, row in enumerate(part.rows):
            if wanted(row):
                places.setdefault((part.rows.where(place), row.key), (part.rows, place))
    return _HeldOut(places.values())
