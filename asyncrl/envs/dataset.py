"""Rows of a data set as tasks: one prompt, an answer, with tools on the way to it, and a reward rule that judges it.

Files with verl's columns work unchanged (:mod:`asyncrl.datasets`); the row's ``data_source`` selects the rule
(:mod:`asyncrl.rewards`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

from asyncrl.datasets import Dataset, PromptRow, Stream, open_conversations, open_dataset, open_prompts, read_prompt
from asyncrl.datasets.rows import PROMPT_COLUMNS
from asyncrl.datasets.source import check_files
from asyncrl.envs.tools import PythonTool, Toolbox
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import FilteredPrompts, Message, PromptLength, Step, Task, Tool
from asyncrl.plugins import Part
from asyncrl.rewards.rules import Answer, Rulebook
from asyncrl.rewards.scoring import load_function
from asyncrl.rollout.trajectory import REWARD_PARTS

_log = logging.getLogger(__name__)
_KEY = "env.options"


class DatasetEnvironment:
    """One prompt; the first message without a tool call is the answer."""

    def __init__(self, rules: Rulebook, toolbox: Toolbox | None = None) -> None:
        self._rules = rules
        self._toolbox = toolbox
        self._task: Task | None = None
        self._messages: list[Message] = []

    @property
    def tools(self) -> Sequence[Tool]:
        return self._toolbox.declarations if self._toolbox is not None else ()

    @property
    def deterministic(self) -> bool:
        """Whether the task's rule declares itself deterministic, and there are no tools."""
        task = self._task
        return task is not None and self._toolbox is None and self._rules.deterministic(task["data_source"])

    async def reset(self, task: Task) -> Sequence[Message]:
        self._task, self._messages = task, list(task["prompt"])
        return list(self._messages)

    async def step(self, reply: Message) -> Step:
        if self._task is None:
            raise EnvironmentFailure("step before reset: the environment has no task")
        if self._toolbox is not None and (answers := await self._toolbox.answer_all(reply)):
            messages = tuple(each.message for each in answers)
            self._messages += [reply, *messages]
            return Step(messages=messages)
        return await self._judge(self._task, reply)

    async def close(self) -> None:
        self._task = None

    async def _judge(self, task: Task, reply: Message) -> Step:
        """Return the last step: the reward of the answer."""
        answer = Answer(
            data_source=task["data_source"],
            solution_str=str(reply.get("content") or ""),
            ground_truth=task["ground_truth"],
            extra_info=task["extra_info"],
            prompt=tuple(self._messages),
        )
        verdict = await self._rules.judge(answer)
        return Step(reward=verdict.score, done=True, info={REWARD_PARTS: dict(verdict.parts)})


class DatasetFactory:
    """Tasks from the rows of files, which the first task, or :meth:`filter_overlong_prompts` before it, reads.

    Args:
        files: a path, a pattern, a folder, ``hub:owner/name?split=train``, or several of them. May be omitted with
            ``held_out`` or ``demonstrations``, for runs that do not train.
        sources: a mixture instead of ``files``: tables with the keys of :class:`asyncrl.datasets.SourceConfig`.
        held_out: files of the held-out split, each row once, in their order. Training rows with one of its prompts are
            left out and counted.
        held_out_share: without ``held_out``, the share of the training rows that is held out, by hash of the prompt.
        columns: other names of columns in ``files`` and ``held_out``: ``{prompt = "extra_info.text"}``.
        order: ``shuffled`` (every pass differently, by seed) or ``file``.
        system: system message for prompts without one.
        reward: the rule of all rows that ``rewards`` does not cover: a name, ``package.module:function``,
            ``path/to/file.py:function``, a table with options, or a list of tables with weights.
        rewards: rules by data source, or by pattern with ``*``.
        tools: functions that the model may call (:mod:`asyncrl.envs.tools`): ``package.module:function``,
            ``path/to/file.py:function``, or the functions. ``env.max_turns`` bounds the turns.
        tool_deadline_s: for each call of a tool, within ``env.deadline_s``, which the whole turn has.
        max_prompt_tokens: longer prompts are left out and counted, as are prompts that fill a trajectory; both with the
            declarations of the tools.
        demonstrations: files of conversations for a supervised warm start.
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
        tools: Sequence[Part] = (),
        tool_deadline_s: float = 30.0,
        max_prompt_tokens: int | None = None,
        demonstrations: str | list[str] | None = None,
        seed: int = 0,
    ) -> None:
        nothing = all(given is None for given in (files, sources, held_out, demonstrations))
        if nothing or (files is not None and sources is not None):
            raise ConfigError(
                "a dataset needs either files or sources, or at least held_out or demonstrations",
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
        if not 0 < tool_deadline_s < math.inf:
            raise ConfigError(
                f"tool_deadline_s is {tool_deadline_s}", path=f"{_KEY}.tool_deadline_s", remedy="a positive number"
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
        self._tool_deadline_s = tool_deadline_s
        self._toolbox: Toolbox | None = None
        if tools:
            functions = [load_function(each) if isinstance(each, str) else each for each in tools]
            own = [each if isinstance(each, PythonTool) else PythonTool(each) for each in functions]
            self._toolbox = Toolbox(own, deadline_s=tool_deadline_s)
        self._declared: Sequence[Tool] = self._toolbox.declarations if self._toolbox is not None else ()
        self._reading = threading.Lock()
        self._read_splits: tuple[Stream[PromptRow] | None, _HeldOut | None] | None = None
        self._conversations: Callable[[int], Sequence[Message]] | None = None

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        train, held_out = self._splits()
        if split == "train" and train is not None:
            return self._task(train[index])
        if split == "train":
            raise ConfigError(
                "the dataset has no row to train on", path=f"{_KEY}.files", remedy='give files, such as "train.parquet"'
            )
        if held_out is None or not len(held_out):
            raise ConfigError(
                "the dataset has no held-out row to evaluate on",
                path=f"{_KEY}.held_out",
                remedy='give files (held_out = "test.parquet"), a held_out_share, or eval.tasks = 0',
            )
        return self._task(held_out[index % len(held_out)])

    def make(self) -> DatasetEnvironment:
        return DatasetEnvironment(self._rules, self._toolbox)

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

    def filter_overlong_prompts(self, count_tokens: PromptLength, *, below: int) -> FilteredPrompts:
        """Read all rows and leave out prompts of ``below`` tokens or more, or more than ``max_prompt_tokens``."""
        train, held_out = self._splits()
        most = below - 1 if self._max_prompt_tokens is None else min(below - 1, self._max_prompt_tokens)

        def fits(row: PromptRow) -> bool:
            return count_tokens(self._prompt(row), self._declared) <= most

        before = after = 0
        if train is not None:
            before += train.rows
            train = train.filtered(fits)
            after += train.rows
        if held_out is not None:
            before += len(held_out)
            held_out = held_out.filtered(fits)
            after += len(held_out)
        self._read_splits = train, held_out
        if not after or (train is not None and not train.parts):
            raise ConfigError(
                f"each of the {before} prompts has more than {most} tokens",
                path=f"{_KEY}.max_prompt_tokens",
                remedy="raise it and rollout.max_seq_len",
            )
        return FilteredPrompts(kept=after, left_out=before - after, longest_tokens=most)

    @property
    def held_out_rows(self) -> int:
        """Number of rows in the held-out split."""
        held_out = self._splits()[1]
        return 0 if held_out is None else len(held_out)

    async def aclose(self) -> None:
        """Close the reward rules."""
        await self._rules.close()

    def _splits(self) -> tuple[Stream[PromptRow] | None, _HeldOut | None]:
        with self._reading:
            if self._read_splits is None:
                self._read_splits = self._read()
            return self._read_splits

    def _read(self) -> tuple[Stream[PromptRow] | None, _HeldOut | None]:
        train = open_prompts(self._written, seed=self._seed, key=_KEY) if self._written is not None else None
        held_out: _HeldOut | None = None
        held_out_keys: set[bytes] = set()
        if self._held_out_files is not None:
            rows = open_dataset(
                self._held_out_files,
                read_prompt,
                columns=self._columns,
                known=PROMPT_COLUMNS,
                key=f"{_KEY}.held_out",
            )
            held_out = _HeldOut((rows, place) for place in range(len(rows)))
            held_out_keys = {row.key for row in held_out}
        elif self._held_out_share and train is not None:
            held_out = _share(train, self._is_held_out)
            held_out_keys = {row.key for row in held_out}
        # This pass over all rows raises the errors of invalid rows and of sources without a rule.
        columns: dict[str, set[str]] = {}
        for row in chain(*(part.rows for part in (train.parts if train is not None else ())), held_out or ()):
            if self._needs_rule(row):
                columns.setdefault(row.data_source, {*row.extra_info}).intersection_update(row.extra_info)
        self._rules.check(columns)
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

    def _needs_rule(self, row: PromptRow) -> bool:
        """Return whether the rule of its source judges a row."""
        del row
        return True

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
    """The rows of the held-out split by their places in data sets; they are read on demand."""

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
    """Return the rows of all parts for which ``wanted`` holds; a row of a file that several parts share counts once."""
    places: dict[tuple[str, bytes], tuple[Dataset[PromptRow], int]] = {}
    for part in train.parts:
        for place, row in enumerate(part.rows):
            if wanted(row):
                places.setdefault((part.rows.where(place), row.key), (part.rows, place))
    return _HeldOut(places.values())
