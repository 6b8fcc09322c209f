"""Environments written for TRL's ``environment_factory``: classes whose public methods are tools.

The class needs nothing of TRL: ``reset(**columns)`` returns None or a text, which is appended to the last user message;
public methods, with annotations and docstrings, are the tools; ``get_reward()`` returns the reward at the end. Reward
functions in TRL's form (``f(prompts, completions, environments, **columns)``) get lists of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.envs.dataset import DatasetFactory
from asyncrl.envs.tools import PythonTool, Toolbox
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import Message, Step, Task, Tool
from asyncrl.plugins import Part
from asyncrl.rewards.scoring import load_function
from asyncrl.runtime import in_own_thread

_KEY = "env.options.environment_factory"


class TRLEnvironment:
    """One episode with an instance of its own; the first message without a tool call ends it.

    Args:
        instance: made by the user's factory.
        rewards: reward functions in TRL's form.
        replayable: whether a killed run may repeat the calls of its unfinished episodes.
        tool_deadline_s: for each call of a tool.
    """

    def __init__(
        self, instance: Any, rewards: Sequence[Callable[..., Any]], *, replayable: bool, tool_deadline_s: float
    ) -> None:
        self.replayable = replayable
        self._instance = instance
        self._rewards = rewards
        methods = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
        shown = [name for name in methods if not name.startswith("_") and name not in ("reset", "get_reward", "close")]
        self._toolbox = Toolbox((PythonTool(getattr(instance, name)) for name in shown), deadline_s=tool_deadline_s)
        self._columns: dict[str, Any] = {}
        self._prompt: list[Message] = []
        self._completion: list[Message] = []

    @property
    def tools(self) -> Sequence[Tool]:
        return self._toolbox.declarations

    async def reset(self, task: Task) -> Sequence[Message]:
        extra: Mapping[str, Any] = task["extra_info"]
        self._columns = {**extra, "data_source": task["data_source"], "ground_truth": task["ground_truth"]}
        self._prompt = [dict(message) for message in task["prompt"]]
        observed = await _called(self._instance.reset, prompt=self._prompt, **self._columns)
        if observed is not None:
            if not isinstance(observed, str):
                raise EnvironmentFailure(f"reset returned a {type(observed).__name__}; it returns None or a text")
            self._prompt[-1] = {**self._prompt[-1], "content": f"{self._prompt[-1]['content']}{observed}"}
        return list(self._prompt)

    async def step(self, reply: Message) -> Step:
        self._completion.append(reply)
        if answers := await self._toolbox.answer_all(reply):
            messages = tuple(answer.message for answer in answers)
            self._completion += messages
            return Step(messages=messages, info={"mistakes": sum(answer.mistake for answer in answers)})
        given = {
            "prompts": [self._prompt],
            "completions": [self._completion],
            "environments": [self._instance],
            **{name: [value] for name, value in self._columns.items()},
        }
        values = [_only(await _called(each, **given), each) for each in self._rewards]
        if hasattr(self._instance, "get_reward"):
            values.append(await _called(self._instance.get_reward))
        return Step(reward=sum(float(value) for value in values if value is not None), done=True)

    async def close(self) -> None:
        if hasattr(self._instance, "close"):
            await _called(self._instance.close)


class TRLFactory(DatasetFactory):
    """Tasks from the rows of files; each episode gets a new instance of the user's class.

    Args:
        environment_factory: the class, or a function that makes an instance: ``package.module:Name``,
            ``path/to/file.py:Name``, or the object.
        reward_funcs: functions in TRL's form; their rewards, and that of ``get_reward``, are summed.
        replayable: whether a killed run may repeat the calls of its unfinished episodes: no call has an effect outside
            the episode.
        options: those of :class:`~asyncrl.envs.dataset.DatasetFactory`, without ``tools`` and rules.

    Raises:
        ConfigError: the class has no ``reset``, there is no reward, or the data set's options cannot be used.
    """

    def __init__(
        self,
        *,
        environment_factory: Part,
        reward_funcs: Sequence[Part] = (),
        replayable: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name in ("tools", "reward", "rewards"):
            if name in options:
                remedy = "methods of the class are its tools, get_reward and reward_funcs its reward"
                raise ConfigError(f"trl does not take {name}", path=f"env.options.{name}", remedy=remedy)
        super().__init__(seed=seed, reward="none", **options)
        given = environment_factory
        self._factory: Callable[[], Any] = load_function(given) if isinstance(given, str) else given
        self._functions = [load_function(each) if isinstance(each, str) else each for each in reward_funcs]
        self._replayable = replayable
        instance = self._factory()
        if not callable(getattr(instance, "reset", None)):
            remedy = "write reset(self, **columns), as TRL requires"
            raise ConfigError(f"a {type(instance).__name__} has no reset", path=_KEY, remedy=remedy)
        if not self._functions and not hasattr(instance, "get_reward"):
            remedy = "write get_reward(self), or give reward_funcs"
            raise ConfigError(f"a {type(instance).__name__} has no reward", path=_KEY, remedy=remedy)
        self._declared = self._environment(instance).tools

    def make(self) -> TRLEnvironment:  # type: ignore[override]
        return self._environment(self._factory())

    def _environment(self, instance: Any) -> TRLEnvironment:
        return TRLEnvironment(
            instance, self._functions, replayable=self._replayable, tool_deadline_s=self._tool_deadline_s
        )


async def _called(function: Callable[..., Any], **given: Any) -> Any:
    """Call a user's function, in a thread unless it is async, with those arguments that it takes."""
    parameters = inspect.signature(function).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        given = {name: given[name] for name in given if name in {each.name for each in parameters}}
    if inspect.iscoroutinefunction(function):
        return await function(**given)
    return await in_own_thread(function, **given)


def _only(values: Any, function: Callable[..., Any]) -> Any:
    if not isinstance(values, Sequence) or len(values) != 1:
        name = getattr(function, "__name__", repr(function))
        raise EnvironmentFailure(
            f"the reward function {name} must return one reward for one completion, got {values!r:.100}"
        )
    return values[0]
