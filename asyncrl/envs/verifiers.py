"""Tasksets of the package ``verifiers`` (0.4): a prompt, one answer, and the task's own rewards.

What a task of verifiers does beside that, in a runtime with a harness and servers of tools, is refused by name: such an
environment is a whole program, which talks to a served model.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any, Literal

from asyncrl.envs.calculator import is_held_out
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import Message, Step, Task, Tool
from asyncrl.rollout.trajectory import REWARD_PARTS

_KEY = "env.options.taskset"


class VerifiersEnvironment:
    """One prompt, one answer. The rewards are methods of the task, and read the conversation from a trace."""

    tools: Sequence[Tool] = ()

    def __init__(self, tasks: Sequence[Any], *, deterministic: bool) -> None:  # Any: verifiers is imported when used
        self.deterministic = deterministic
        self._tasks = tasks
        self._task: Any = None
        self._trace: Any = None

    async def reset(self, task: Task) -> Sequence[Message]:
        found = self._tasks[task["item"]]
        if found.hash != task["hash"]:
            raise EnvironmentFailure(f"item {task['item']} is not the task, which came from another version of it")
        self._task, self._trace = found, _trace_of(found)
        await found.setup(self._trace, None)
        messages = _messages_of(found.data)
        for message in messages:
            self._add(message, sampled=False)
        return messages

    async def step(self, reply: Message) -> Step:
        if self._task is None:
            raise EnvironmentFailure("step before reset: the environment has no task")
        self._add({"role": "assistant", "content": str(reply.get("content") or "")}, sampled=True)
        self._trace.is_completed = self._trace.ok = True
        await self._task.finalize(self._trace, None)
        await self._task.score(self._trace, None)
        parts = {name: each.value for name, each in self._trace.rewards.items() if each is not None}
        if not parts:
            raise EnvironmentFailure("the task gave no reward")
        measured = {name: value for name, value in self._trace.metrics.items() if value is not None}
        return Step(reward=float(self._trace.reward), done=True, info={REWARD_PARTS: {**measured, **parts}})

    async def close(self) -> None:
        self._task = self._trace = None

    def _add(self, message: Message, *, sampled: bool) -> None:
        graph: Any = importlib.import_module("verifiers.v1.graph")
        parent = len(self._trace.nodes) - 1 if self._trace.nodes else None
        self._trace.nodes.append(graph.MessageNode(parent=parent, message=message, sampled=sampled))


class VerifiersFactory:
    """Tasks of a taskset; one in five, by the hash of its content, is held out.

    Args:
        taskset: its installed name, or the module that exports it.
        size: of an infinite taskset, or one with more tasks, so many are used.
        deterministic: whether its rewards are functions of the answer alone.
        config: options of the taskset.
    """

    package = "verifiers"

    def __init__(
        self, *, taskset: str, seed: int = 0, size: int = 10_000, deterministic: bool = False, **config: Any
    ) -> None:
        try:
            loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
            generic: Any = importlib.import_module("verifiers.v1.utils.generic")
            base: Any = importlib.import_module("verifiers.v1.taskset")
        except ImportError as error:
            text = f"the environment verifiers needs the package verifiers, 0.4 or later: {error}"
            raise ConfigError(text, path="env", remedy="pip install asyncrl[verifiers]") from error
        try:
            kind = loaders.taskset_class(taskset)
            options = generic.concrete_type(kind, base.TasksetConfig, origin=base.Taskset) or base.TasksetConfig
            made = kind(options(id=taskset, **config))
            tasks = list(made.take(size))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            text = f"verifiers cannot make the taskset {taskset!r} with {config}: {type(error).__name__}: {error}"
            raise ConfigError(text, path=_KEY, remedy="an installed taskset, and its options") from error
        if not tasks:
            raise ConfigError(f"the taskset {taskset!r} is empty", path=_KEY, remedy="another one, or other options")
        if reason := _refused(made, tasks[0]):
            remedy = "serve the policy with asyncrl serve, and let verifiers run the taskset against it"
            raise ConfigError(f"the taskset {taskset!r} {reason}", path=_KEY, remedy=remedy)
        self._tasks = tasks
        self._deterministic = deterministic
        held_out = [is_held_out(each.hash) for each in tasks]
        self._splits = {
            "train": [item for item, held in enumerate(held_out) if not held] or list(range(len(tasks))),
            "held_out": [item for item, held in enumerate(held_out) if held],
        }
        self._seed = seed

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        items = self._splits[split]
        if not items:
            raise ConfigError("no task of the taskset is held out", path=_KEY, remedy="eval.tasks = 0")
        item = items[(index + self._seed) % len(items)]
        return {"item": item, "hash": self._tasks[item].hash}

    @property
    def held_out_rows(self) -> int:
        """Number of held-out tasks."""
        return len(self._splits["held_out"])

    def make(self) -> VerifiersEnvironment:
        return VerifiersEnvironment(self._tasks, deterministic=self._deterministic)

    def demonstration(self, index: int) -> list[Message]:
        raise ConfigError("verifiers has no demonstrations", path="sft", remedy="start from a pretrained model")


def _refused(taskset: Any, task: Any) -> str:
    """Return what a task needs that there is not; empty if it needs nothing of the kind."""
    if type(task).NEEDS_CONTAINER:
        return "needs a container"
    if type(task).toolsets(task.config) or type(taskset).toolsets(taskset.config):
        return "has servers of tools"
    if task.data.prompt is None:
        return "has tasks without a prompt: its environment plays the user"
    rewards = [*task.hooks("reward"), *(each.score for each in task.plugged_judges())]
    for each in rewards:
        parameter = inspect.signature(each).parameters.get("runtime")
        if parameter is not None and parameter.default is parameter.empty:
            return f"has the reward {each.__name__!r}, which needs a runtime"
    return "" if rewards else "has no rewards of its own"


def _trace_of(task: Any) -> Any:
    trace: Any = importlib.import_module("verifiers.v1.trace")
    agent: Any = importlib.import_module("verifiers.v1.configs.agent")
    described = trace.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return trace.Trace(task=described, agent=trace.AgentInfo(config=agent.AgentConfig()))


def _messages_of(data: Any) -> list[Message]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(each.model_dump(exclude_none=True) for each in data.prompt)]
