"""Games of the package ``textarena``: one player is the policy, the others are scripted or a function of the user.

A task is a seed, and the player that the policy is. Games draw from the global generators of Python and NumPy, so each
episode has states of its own for them, and calls run one at a time.

An episode is one trajectory with one reward. Self-play in which each player is a trajectory needs more than one; a copy
of the policy can play against it as the ``opponent``, over the address that serves it.
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from asyncrl.envs.calculator import question_messages
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import Message, Step, Task, Tool
from asyncrl.plugins import Part
from asyncrl.rewards.scoring import load_function
from asyncrl.runtime import in_thread

_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
_MOST_MOVES = 10_000
_MOST_BEGINS = 8
"""Of one game, with other draws of the opponent: a random one may lose it before the policy has moved."""
_drawing = threading.Lock()


def choose_bracketed(observation: str, *, draw: random.Random) -> str:
    """Return a random one of the moves that a game shows in brackets; ``[0]`` if it shows none."""
    moves: list[str] = _BRACKETED.findall(observation)
    return draw.choice(moves or ["[0]"])


class TextArenaEnvironment:
    """One game of ``players``; ``opponent`` moves for the others: ``f(observation, draw=random.Random)``."""

    tools: Sequence[Tool] = ()

    def __init__(
        self, make: Callable[[], Any], *, players: int, opponent: Callable[..., Any], instructions: str
    ) -> None:
        self.deterministic = opponent is choose_bracketed
        self._make = make
        self._players = players
        self._opponent = opponent
        self._instructions = instructions
        self._game: Any = None  # Any: textarena is imported when it is used
        self._states: tuple[Any, Any] | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        self._player = int(task["player"])

        def begin() -> None:
            random.seed(task["seed"])
            np.random.seed(task["seed"])
            self._game = self._make()
            self._game.reset(num_players=self._players, seed=task["seed"])

        for attempt in range(_MOST_BEGINS):
            self._draw = random.Random(f"opponent/{task['seed']}/{attempt}")  # noqa: S311 (reproducible, not secret)
            await self._call(begin)
            text = await self._until_its_turn()
            if text is not None:
                return question_messages(text, instructions=self._instructions)
        raise EnvironmentFailure(
            f"the game was over before player {self._player} had moved, {_MOST_BEGINS} times: give an opponent that "
            "makes legal moves (env.options.opponent)"
        )

    async def step(self, reply: Message) -> Step:
        over = await self._move(str(reply.get("content") or ""))
        if not over and (text := await self._until_its_turn()) is not None:
            return Step(messages=({"role": "user", "content": text},))
        rewards, info = await self._call(self._game.close)
        if not isinstance(rewards, dict) or self._player not in rewards:
            raise EnvironmentFailure(f"the game ended without a reward of player {self._player}: {rewards!r:.100}")
        invalid = bool(info.get(self._player, {}).get("invalid_move"))
        return Step(reward=float(rewards[self._player]), done=True, info={"invalid_move": invalid})

    async def close(self) -> None:
        self._game = None

    async def _until_its_turn(self) -> str | None:
        """Let the others move; return the policy's next observation, or None if the game is over."""
        for _ in range(_MOST_MOVES):
            player, seen = await self._call(self._game.get_observation)
            text = seen if isinstance(seen, str) else "\n".join(str(each[1]) for each in seen)
            if player == self._player:
                return text
            move = self._opponent(text, draw=self._draw)
            if await self._move(str(await move if inspect.isawaitable(move) else move)):
                return None
        raise EnvironmentFailure(f"the others have moved {_MOST_MOVES} times, and player {self._player} has no turn")

    async def _move(self, action: str) -> bool:
        return bool((await self._call(lambda: self._game.step(action=action)))[0])

    async def _call(self, call: Callable[[], Any]) -> Any:
        def locked() -> Any:
            with _drawing:
                before = _states()
                if self._states is not None:
                    _set_states(self._states)
                try:
                    return call()
                finally:
                    self._states = _states()
                    _set_states(before)

        return await in_thread(locked)


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _first_line(error: Exception) -> str:
    lines = (line.strip(" *") for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), '')}"


class TextArenaFactory:
    """Games by seed: task n of a split is a seed of its own.

    Args:
        game: its id, such as ``TicTacToe-v0``.
        players: in all; the fewest that the game accepts if None.
        player: the one that the policy is; each in turn, by task, if None.
        opponent: moves for the others: ``f(observation, draw=random.Random)``, perhaps ``async``, by name or itself.
            By default one of the moves that the observation shows in brackets.
        instructions: system message; none if empty.
        config: options of the game.
    """

    package = "textarena"

    def __init__(
        self,
        *,
        game: str,
        seed: int = 0,
        players: int | None = None,
        player: int | None = None,
        opponent: Part = choose_bracketed,
        instructions: str = "",
        **config: Any,
    ) -> None:
        try:
            textarena: Any = importlib.import_module("textarena")
        except ImportError as error:
            text = f"the environment textarena needs the package textarena: {error}"
            raise ConfigError(text, path="env", remedy="pip install asyncrl[textarena]") from error
        self._game, self._seed, self._player = game, seed, player
        self._make: Callable[[], Any] = lambda: textarena.make(game, **config)
        accepted = [each for each in ([players] if players else range(1, 16)) if self._accepts(each)]
        if not accepted or (player is not None and not 0 <= player < accepted[0]):
            cause = "" if self._refusal is None else f": {_first_line(self._refusal)}"
            text = f"{game} cannot be begun with {players or 'any number of'} players, one of them {player or 0}{cause}"
            raise ConfigError(text, path="env.options.game", remedy="another game, or number") from self._refusal
        self._options: dict[str, Any] = {"players": accepted[0], "instructions": instructions}
        self._options["opponent"] = load_function(opponent) if isinstance(opponent, str) else opponent

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        player = index % int(self._options["players"]) if self._player is None else self._player
        seed = ((self._seed << 20) + 2 * index + (split == "held_out")) % (1 << 32)
        return {"game": self._game, "seed": seed, "player": player}

    def make(self) -> TextArenaEnvironment:
        return TextArenaEnvironment(self._make, **self._options)

    def demonstration(self, index: int) -> list[Message]:
        raise ConfigError("textarena has no demonstrations", path="sft", remedy="start from a pretrained model")

    def _accepts(self, players: int) -> bool:
        self._refusal: Exception | None = None
        try:
            with _drawing:
                self._make().reset(num_players=players, seed=0)
        except Exception as error:  # noqa: BLE001  a game may raise anything; the last is the cause of the refusal
            self._refusal = error
        return self._refusal is None
