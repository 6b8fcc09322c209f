"""Environments of the package ``gymnasium`` whose actions can be written: discrete ones, lists of them, and texts.

Observations become text: numbers as they are, numbers of a vocabulary as its words, or what the environment renders. A
task is a seed, the splits have different ones, and an episode ends when the environment terminates or truncates it.
"""

from __future__ import annotations

import importlib
import logging
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from asyncrl.envs.calculator import question_messages
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import Message, Step, Task, Tool
from asyncrl.runtime import in_own_thread

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_R = TypeVar("_R")

_INTEGER = re.compile(r"-?\d+")
_LONGEST_DEMONSTRATION = 8
_STEP_ENDS_S = 10.0
"""Time for a step that was given up to end before its environment is closed beside it."""


class Actions:
    """Reads actions of a space from replies.

    Args:
        space: Discrete, MultiDiscrete, or Text.
        names: a word for each action of a discrete space, instead of its number.

    Raises:
        ConfigError: a space of another kind, or a number of names that is not that of the actions.
    """

    def __init__(self, space: Any, names: Sequence[str]) -> None:  # Any: gymnasium is imported when it is used
        self._space = space
        self._names = [name.lower() for name in names]
        kind = type(space).__name__
        if kind not in ("Discrete", "MultiDiscrete", "Text"):
            remedy = "an environment whose actions are Discrete, MultiDiscrete or Text, or a wrapper that makes them so"
            raise ConfigError(
                f"its actions are {space}, which a model cannot write", path="env.options.id", remedy=remedy
            )
        if names and (kind != "Discrete" or len(names) != space.n):
            raise ConfigError(
                f"{len(names)} names for {space}", path="env.options.actions", remedy="a name for each action"
            )
        if kind == "Text":
            self.hint = "Answer with your action."
        elif kind == "MultiDiscrete":
            ranges = [f"{least} to {least + size - 1}" for least, size in self._ranges()]
            self.hint = f"Answer with {len(ranges)} numbers: {', '.join(ranges)}."
        else:
            shown = names or [str(number) for number in range(space.start, space.start + space.n)]
            self.hint = f"Answer with one of: {', '.join(shown)}."

    def read(self, reply: str) -> Any:
        """Return the last action in ``reply``, or None if there is none."""
        if type(self._space).__name__ == "Text":
            return reply if self._space.contains(reply) else None
        if self._names:
            longest_first = sorted(self._names, key=len, reverse=True)
            found = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", reply.lower())
            return self._space.start + self._names.index(found[-1]) if found else None
        numbers = [int(number) for number in _INTEGER.findall(reply) if len(number) < 10]
        if type(self._space).__name__ == "Discrete":
            return numbers[-1] if numbers and self._space.contains(numbers[-1]) else None
        shape = self._space.nvec.shape
        chosen = numbers[-self._space.nvec.size :]
        if len(chosen) < self._space.nvec.size:
            return None
        import numpy as np

        action = np.array(chosen, dtype=self._space.dtype).reshape(shape)
        return action if self._space.contains(action) else None

    def write(self, draw: random.Random) -> str:
        """Return a random action as a reply."""
        if type(self._space).__name__ == "Text":
            raise ConfigError("actions are texts: there is no demonstration", path="sft", remedy="a pretrained model")
        if type(self._space).__name__ == "MultiDiscrete":
            return " ".join(str(least + draw.randrange(size)) for least, size in self._ranges())
        number = draw.randrange(int(self._space.n))
        return self._names[number] if self._names else str(number + int(self._space.start))

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the least number and the count of numbers of each action of a MultiDiscrete space."""
        return list(zip(self._space.start.ravel().tolist(), self._space.nvec.ravel().tolist(), strict=True))


class GymnasiumEnvironment:
    """One episode. Calls of the environment run in threads, one at a time, and it closes behind the last of them.

    Args:
        environment: a ``gymnasium.Env``, used for this episode alone.
        actions: its actions.
        instructions: system message; none if empty.
        symbols: words of the observation's numbers.
        rendered: show what the environment renders instead of the observation.
        invalid_reward: reward of a reply without an action; the environment does not see it.
    """

    tools: Sequence[Tool] = ()

    def __init__(
        self,
        environment: Any,
        actions: Actions,
        *,
        instructions: str,
        symbols: Sequence[str],
        rendered: bool,
        invalid_reward: float,
    ) -> None:
        self._environment = environment
        self._actions = actions
        self._instructions = instructions
        self._symbols = symbols
        self._rendered = rendered
        self._invalid_reward = invalid_reward
        self._mistakes = 0
        self._busy = threading.Lock()
        self._open = threading.Lock()  # taken by who closes, and never given back
        self._to_close = False
        spec = environment.spec
        self.deterministic = spec is not None and not spec.nondeterministic

    async def reset(self, task: Task) -> Sequence[Message]:
        return await in_own_thread(self._alone, self.reset_here, int(task["seed"]))

    async def step(self, reply: Message) -> Step:
        return await in_own_thread(self._alone, self.step_here, str(reply.get("content") or ""))

    async def close(self) -> None:
        self._to_close = True
        await in_own_thread(self._close, _STEP_ENDS_S)

    def _alone(self, call: Callable[[_T], _R], given: _T) -> _R:
        try:
            with self._busy:
                return call(given)
        finally:
            if self._to_close:
                self._close(0.0)

    def _close(self, wait_s: float) -> None:
        """Close once, after the call that runs; beside it, if it takes longer than ``wait_s``, unless that is 0."""
        alone = self._busy.acquire(timeout=wait_s)
        try:
            if (alone or wait_s) and self._open.acquire(blocking=False):
                if not alone:
                    _log.warning("%s is closed while a step of it still runs", self._environment)
                self._environment.close()
        finally:
            if alone:
                self._busy.release()

    def reset_here(self, seed: int) -> list[Message]:
        """Begin, in this thread."""
        observation, _ = self._environment.reset(seed=seed)
        return question_messages(self._text(observation), instructions=self._instructions)

    def step_here(self, reply: str) -> Step:
        """Do the action of a reply, in this thread."""
        action = self._actions.read(reply)
        if action is None:
            self._mistakes += 1
            text = f"This is no action. {self._actions.hint}"
            info = {"mistakes": self._mistakes}
            return Step(messages=({"role": "user", "content": text},), reward=self._invalid_reward, info=info)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        done = bool(terminated or truncated)
        messages = () if done else ({"role": "user", "content": self._text(observation)},)
        info = {"mistakes": self._mistakes, "truncated": bool(truncated)}
        return Step(messages=messages, reward=float(reward), done=done, info=info)

    def _text(self, observation: Any) -> str:
        if not self._rendered:
            return observation_text(observation, self._symbols)
        text = self._environment.render()
        if not isinstance(text, str):
            raise EnvironmentFailure(f"the environment renders a {type(text).__name__}, not a text")
        return text


class GymnasiumFactory:
    """Episodes by seed: task n of a split is a seed of its own.

    Args:
        id: the environment's id; ``module:Name-v0`` imports the module that registers it.
        actions: words for the actions, in their order; their numbers if empty.
        symbols: words for the numbers of an observation that is made of token ids.
        render: show the environment's text rendering (``render_mode = "ansi"``) instead of its observation.
        instructions: system message; by default it says which actions there are.
        invalid_reward: reward of a reply without an action.
        config: options of the environment.
    """

    package = "gymnasium"

    def __init__(
        self,
        *,
        id: str,  # noqa: A002  gymnasium's word
        seed: int = 0,
        actions: Sequence[str] = (),
        symbols: Sequence[str] = (),
        render: bool = False,
        instructions: str | None = None,
        invalid_reward: float = 0.0,
        **config: Any,
    ) -> None:
        try:
            gymnasium: Any = importlib.import_module("gymnasium")
        except ImportError as error:
            text = "the environment gymnasium needs the package gymnasium"
            raise ConfigError(text, path="env", remedy="pip install asyncrl[gymnasium]") from error
        self._id = id
        self._seed = seed
        self._symbols = tuple(symbols)
        self._render = render
        self._invalid_reward = invalid_reward
        options = {**({"render_mode": "ansi"} if render else {}), **config}
        self._make: Callable[[], Any] = lambda: gymnasium.make(id, **options)
        try:
            environment = self._make()
        except Exception as error:  # an environment may raise anything
            text = f"gymnasium cannot make {id!r} with {config}: {type(error).__name__}: {error}"
            raise ConfigError(
                text, path="env.options.id", remedy="an id of gymnasium.registry, and its options"
            ) from error
        self._actions = Actions(environment.action_space, actions)
        environment.close()
        self._instructions = self._actions.hint if instructions is None else instructions

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        return {"id": self._id, "seed": (self._seed << 32) + 2 * index + (split == "held_out")}

    def make(self) -> GymnasiumEnvironment:
        return GymnasiumEnvironment(
            self._make(),
            self._actions,
            instructions=self._instructions,
            symbols=self._symbols,
            rendered=self._render,
            invalid_reward=self._invalid_reward,
        )

    def demonstration(self, index: int) -> list[Message]:
        """Return random actions: they show the form of a reply, not how to play."""
        environment = self.make()
        draw = random.Random(f"{self._seed}/{index}")  # noqa: S311 (reproducible, not secret)
        messages = environment.reset_here((self._seed << 32) + 2 * index)
        for number in range(_LONGEST_DEMONSTRATION):
            messages.append({"role": "assistant", "content": self._actions.write(draw)})
            step = environment.step_here(messages[-1]["content"])
            if step.done or number + 1 == _LONGEST_DEMONSTRATION:
                break
            messages += step.messages
        return messages


def observation_text(value: Any, symbols: Sequence[str] = ()) -> str:
    """Return numbers, arrays, tuples and mappings of an observation as text; rows of an array on lines of their own.

    Fractions have four significant digits; from 1000 on, two after the point.

    >>> print(observation_text({"hand": (20, 7), "board": [[0, 1], [1, 0]]}))
    hand: 20 7
    board: 0 1
    1 0
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {observation_text(each, symbols)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        parts = [observation_text(each, symbols) for each in value]
        return ("\n" if any(" " in part or "\n" in part for part in parts) else " ").join(parts)
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 2**53:
            return str(int(value))
        return f"{value:.4g}" if abs(value) < 1000 else str(round(value, 2))
    if not symbols or not isinstance(value, int):
        return str(value)
    if not 0 <= value < len(symbols):
        raise EnvironmentFailure(
            f"the observation has the id {value}, and symbols has words for 0 to {len(symbols) - 1}: give the rest"
        )
    return symbols[value]
