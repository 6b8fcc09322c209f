"""Games of the package ``textarena``: one player is the policy, the others are scripted or a function of the user.

A task is a seed, and the player that the policy is. Games draw from the global generators of Python and NumPy, so each
episode has states of its own for them, and calls run one at a time.

In self-play the policy is every player of a game: each is a branch of the episode with a reward of its own, which
``algorithm.credit = "branch"`` compares (as SPIRAL does by role: https://arxiv.org/abs/2506.24119).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import random
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from asyncrl.envs.calculator import question_messages
from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure
from asyncrl.interfaces import Message, Step, Task, Tool
from asyncrl.plugins import Part
from asyncrl.rewards.scoring import load_function
from asyncrl.rollout.episode import EpisodePolicy, Players
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.runtime import in_own_thread

_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
_MOST_MOVES = 10_000
_MOST_BEGINS = 64
"""Of one game, with other draws of the opponent: a random one may lose it before the policy has moved."""
_CALL_S = 120.0
_drawing = threading.Lock()
_T = TypeVar("_T")


def choose_bracketed(observation: str, *, draw: random.Random) -> str:
    """Return a random one of the moves that a game shows in brackets; ``[0]`` if it shows none."""
    moves: list[str] = _BRACKETED.findall(observation)
    return draw.choice(moves or ["[0]"])


class _Game:
    """One game of ``players``, begun once or more."""

    def __init__(self, make: Callable[[], Any], *, players: int) -> None:
        self._make = make
        self._players = players
        self._game: Any = None  # Any: textarena is imported when it is used
        self._states: tuple[Any, Any] | None = None

    async def begin(self, seed: int) -> None:
        def begin() -> None:
            random.seed(seed)
            np.random.seed(seed)
            self._game = self._make()
            self._game.reset(num_players=self._players, seed=seed)

        await self._call(begin)

    async def observation(self) -> tuple[int, str]:
        """Return the player whose turn it is, and what it sees."""
        player, seen = await self._call(self._game.get_observation)
        return player, seen if isinstance(seen, str) else "\n".join(str(each[1]) for each in seen)

    async def move(self, action: str) -> bool:
        """Return whether the game is over now."""
        return bool((await self._call(lambda: self._game.step(action=action)))[0])

    async def rewards(self, players: Iterable[int]) -> tuple[dict[int, float], Mapping[int, Any]]:
        """Return the rewards of players of a game that is over, and what is known of each."""
        rewards, info = await self._call(self._game.close)
        if not isinstance(rewards, dict) or not {*players} <= rewards.keys():
            raise EnvironmentFailure(f"the game ended without a reward of each player: {rewards!r:.100}")
        return {player: float(rewards[player]) for player in players}, info

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

        return await in_own_thread(locked)


class TextArenaEnvironment:
    """A game in which the policy is one player; ``opponent`` moves for the others."""

    tools: Sequence[Tool] = ()

    def __init__(self, game: _Game, *, opponent: Callable[..., Any], instructions: str) -> None:
        self.deterministic = opponent is choose_bracketed
        self._game = game
        self._opponent = opponent
        self._instructions = instructions

    async def reset(self, task: Task) -> Sequence[Message]:
        self._player = int(task["player"])
        for attempt in range(_MOST_BEGINS):
            self._draw = random.Random(f"opponent/{task['seed']}/{attempt}")  # noqa: S311 (reproducible, not secret)
            await self._game.begin(task["seed"])
            text = await self._until_its_turn()
            if text is not None:
                return question_messages(text, instructions=self._instructions)
        raise EnvironmentFailure(
            f"the game was over before player {self._player} had moved, {_MOST_BEGINS} times: give an opponent that "
            "makes legal moves (env.options.opponent)"
        )

    async def step(self, reply: Message) -> Step:
        over = await self._game.move(str(reply.get("content") or ""))
        if not over and (text := await self._until_its_turn()) is not None:
            return Step(messages=({"role": "user", "content": text},))
        rewards, info = await self._game.rewards([self._player])
        invalid = bool(info.get(self._player, {}).get("invalid_move"))
        return Step(reward=rewards[self._player], done=True, info={"invalid_move": invalid})

    async def close(self) -> None: ...

    async def _until_its_turn(self) -> str | None:
        """Let the others move; return the policy's next observation, or None if the game is over."""
        for _ in range(_MOST_MOVES):
            player, text = await self._game.observation()
            if player == self._player:
                return text
            move = await in_own_thread(self._opponent, text, draw=self._draw)
            if await self._game.move(str(await move if inspect.isawaitable(move) else move)):
                return None
        raise EnvironmentFailure(f"the others have moved {_MOST_MOVES} times, and player {self._player} has no turn")


class SelfPlayEnvironment:
    """A game in which the policy is every player, each a branch of the episode; or one, where the task names it."""

    credit = "branch"

    def __init__(self, game: _Game, *, opponent: Callable[..., Any], instructions: str) -> None:
        self._game = game
        self._against = TextArenaEnvironment(game, opponent=opponent, instructions=instructions)
        self._instructions = instructions

    async def run_agent(self, task: Task, policy: EpisodePolicy) -> Trajectory:
        players = Players(task, policy)
        if "player" in task:
            return await self._play_one(task, players)
        await _in_time(self._game.begin(task["seed"]))
        seen: set[int] = set()
        over = False
        while not over:
            player, text = await _in_time(self._game.observation())
            messages: Sequence[Message] = ({"role": "user", "content": text},)
            if player not in seen:
                messages = question_messages(text, instructions=self._instructions)
                seen.add(player)
            reply = await players.ask(player, messages)
            if reply is None:
                return players.trajectory({}, {})
            over = await _in_time(self._game.move(str(reply.get("content") or "")))
        rewards, info = await _in_time(self._game.rewards(sorted(seen)))
        invalid = sorted(player for player, known in info.items() if known.get("invalid_move"))
        return players.trajectory(rewards, {"rewards": list(rewards.values()), "invalid_moves_of": invalid})

    async def _play_one(self, task: Task, players: Players) -> Trajectory:
        messages: Sequence[Message] = await _in_time(self._against.reset(task))
        while (reply := await players.ask(task["player"], messages)) is not None:
            step = await _in_time(self._against.step(reply))
            if step.done:
                return players.trajectory({task["player"]: step.reward}, step.info)
            messages = step.messages
        return players.trajectory({}, {})

    async def close(self) -> None: ...


async def _in_time(call: Awaitable[_T]) -> _T:
    """Await a call of the game under a deadline: the episode of an agent has none of the run's."""
    deadline = asyncio.timeout(_CALL_S)
    try:
        async with deadline:
            return await call
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EnvironmentDeadlineError(f"a move took longer than {_CALL_S:g} s") from error


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
        self_play: the policy is every player in training, and ``player`` in held-out tasks, against ``opponent``.
        opponent: moves for the others: ``f(observation, draw=random.Random)``, by name or itself, in a thread unless it
            is ``async``: several episodes may call it at once. By default one of the moves that the observation shows
            in brackets.
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
        self_play: bool = False,
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
        self._players, self._self_play = accepted[0], self_play
        self._options: dict[str, Any] = {"instructions": instructions}
        self._options["opponent"] = load_function(opponent) if isinstance(opponent, str) else opponent

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        seed = ((self._seed << 20) + 2 * index + (split == "held_out")) % (1 << 32)
        if self._self_play and split == "train":
            return {"game": self._game, "seed": seed}
        return {
            "game": self._game,
            "seed": seed,
            "player": index % self._players if self._player is None else self._player,
        }

    def make(self) -> TextArenaEnvironment | SelfPlayEnvironment:
        made = SelfPlayEnvironment if self._self_play else TextArenaEnvironment
        return made(_Game(self._make, players=self._players), **self._options)

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
