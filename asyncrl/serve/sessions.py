"""Sessions: what was sampled for one agent, kept as it was sampled, until a reward makes trajectories of it.

A session is a tree. A request whose messages (or ids) begin with those of an earlier one *and its answer* goes on from
there: its prompt is exactly the ids of that turn and what the new messages add. Anything else begins a new branch, so
an agent may sample several answers, go back, or hold side conversations. Each leaf becomes one trajectory; a turn that
several leaves share is trained on in the first of them only.

The tree is held in memory: one entry a turn, nothing twice, 16 bytes a token.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from asyncrl.interfaces import FinishReason, Generation, Message, Tool
from asyncrl.rollout.trajectory import Trajectory, Turn
from asyncrl.serve.conversation import chain, root_mark
from asyncrl.serve.failure import Refusal
from asyncrl.serve.limits import Limits
from asyncrl.serve.model_text import ModelText

__all__ = ["Session", "Sessions", "TurnPrompt"]


class _Node:
    """One turn: what was appended before it, what was sampled, and the turn it goes on from."""

    __slots__ = ("appended", "children", "finish_reason", "log_probs", "message", "parent", "sampled", "versions")

    def __init__(self, parent: _Node | None, appended: Sequence[int], generation: Generation, message: Message) -> None:
        self.parent = parent
        self.appended = array("i", appended)
        self.sampled = array("i", generation.token_ids)
        self.log_probs = array("f", generation.log_probs)
        self.versions = array("i", generation.weight_versions)
        self.finish_reason: FinishReason = generation.finish_reason
        self.message = message
        self.children = 0

    @property
    def tokens(self) -> int:
        return len(self.appended) + len(self.sampled)

    def path(self) -> list[_Node]:
        """From the first turn to this one."""
        nodes: list[_Node] = []
        node: _Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def token_ids(self) -> array[int]:
        ids = array("i")
        for node in self.path():
            ids += node.appended
            ids += node.sampled
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPrompt:
    """The prompt of a turn, and where in its session it belongs.

    Attributes:
        token_ids: the whole prompt.
        continues: whether it begins with the ids of an earlier turn.
    """

    token_ids: tuple[int, ...]
    continues: bool
    parent: _Node | None = field(repr=False)
    appended: tuple[int, ...] = field(repr=False)
    mark: bytes = field(repr=False)


class Session:
    """One agent's conversation, or several that belong together.

    Attributes:
        name: given by the client.
        holder: whose key made it; nobody else sees it.
        requests: under way.
        ending: whether it is being handed on: it takes no request then.
        touched_s: when it was used last.
        tokens: held.
    """

    def __init__(self, name: str, holder: str) -> None:
        self.name = name
        self.holder = holder
        self.requests = 0
        self.ending = False
        self.touched_s = 0.0
        self.tokens = 0
        self.turns = 0
        self._by_mark: dict[bytes, list[_Node]] = {}
        self._leaves: dict[_Node, None] = {}  # a set that remembers its order

    @property
    def branches(self) -> int:
        """Leaves of the tree: trajectories that it would give."""
        return len(self._leaves)

    def chat_prompt(self, messages: Sequence[Message], tools: Sequence[Tool], text: ModelText) -> TurnPrompt:
        """The prompt for the turn after ``messages``: appended to the turn it goes on from, where there is one."""
        marks = chain(root_mark(tools), messages)
        for at in range(len(messages) - 1, 0, -1):
            if messages[at]["role"] != "assistant" or (node := self._known(marks[at])) is None:
                continue
            before = node.token_ids()
            appended = text.extend(messages[:at], node.sampled, messages[at + 1 :], tools)
            return TurnPrompt(
                token_ids=(*before, *appended), continues=True, parent=node, appended=tuple(appended), mark=marks[-1]
            )
        ids = tuple(text.renderer.prompt(messages, tools))
        return TurnPrompt(token_ids=ids, continues=False, parent=None, appended=ids, mark=marks[-1])

    def token_prompt(self, token_ids: Sequence[int]) -> TurnPrompt:
        """The place of a prompt given as ids: after the turn whose ids it begins with, the longest there is."""
        given = array("i", token_ids)
        best: _Node | None = None
        length = 0
        for leaf in self._leaves:
            ids = leaf.token_ids()
            if length < len(ids) < len(given) and given[: len(ids)] == ids:
                best, length = leaf, len(ids)
        return TurnPrompt(
            token_ids=tuple(token_ids),
            continues=best is not None,
            parent=best,
            appended=tuple(token_ids[length:]),
            mark=b"",
        )

    def _known(self, mark: bytes) -> _Node | None:
        """The turn that ``mark`` stands for; of equal answers the one that nothing has followed yet."""
        nodes = self._by_mark.get(mark)
        return min(nodes, key=lambda node: node.children) if nodes else None

    def add(self, prompt: TurnPrompt, generation: Generation, message: Message) -> int:
        """Write a finished turn down. Returns the tokens it holds."""
        mark = chain(prompt.mark, [message])[0] if prompt.mark else b""
        node = _Node(prompt.parent, prompt.appended, generation, message)
        if prompt.parent is not None:
            prompt.parent.children += 1
            self._leaves.pop(prompt.parent, None)
        if mark:
            self._by_mark.setdefault(mark, []).append(node)
        self._leaves[node] = None
        self.tokens += node.tokens
        self.turns += 1
        return node.tokens

    def trajectories(self, *, reward: float, info: dict[str, object]) -> list[Trajectory]:
        """One per leaf, in the order in which they were sampled, each with ``reward``."""
        trained: set[_Node] = set()
        made = []
        for leaf in self._leaves:
            ids, log_probs, versions = array("i"), array("f"), array("i")
            mask: list[bool] = []
            turns: list[Turn] = []
            for node in leaf.path():
                ids += node.appended
                log_probs.extend([0.0] * len(node.appended))
                versions.extend([-1] * len(node.appended))
                mask += [False] * len(node.appended)
                start = len(ids)
                ids += node.sampled
                log_probs += node.log_probs
                versions += node.versions
                mask += [node not in trained] * len(node.sampled)
                trained.add(node)
                turns.append(Turn(start=start, end=len(ids), finish_reason=node.finish_reason, message=node.message))
            made.append(
                Trajectory(
                    task={"session": self.name},
                    token_ids=tuple(ids),
                    loss_mask=tuple(mask),
                    behaviour_log_probs=tuple(log_probs),
                    weight_versions=tuple(versions),
                    reward=reward,
                    turns=tuple(turns),
                    finish_reason="max_tokens" if turns[-1].finish_reason == "length" else "done",
                    info=info,
                )
            )
        return made


class Sessions:
    """All sessions, by holder and name. The least recently used come first.

    Args:
        limits: bounds.
        clock: seconds that only grow.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self.tokens = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def use(self, name: str, holder: str) -> Session:
        """The session, made if need be.

        Raises:
            Refusal: there is no room for one more, or for more of its tokens, or it is ending.
        """
        self._expire()
        key = (holder, name)
        session = self._sessions.get(key)
        if session is None:
            if len(self._sessions) >= self._limits.sessions:
                raise Refusal(503, f"{len(self._sessions)} sessions are held, no more fit", retry_after_s=30)
            session = self._sessions[key] = Session(name, holder)
        self._sessions.move_to_end(key)
        session.touched_s = self._clock()
        if session.ending:
            raise Refusal(409, f"session {name!r} is being handed on with its reward")
        if session.tokens >= self._limits.session_tokens:
            raise Refusal(
                409, f"session {name!r} holds {session.tokens} tokens; at most {self._limits.session_tokens}: reward it"
            )
        if self.tokens >= self._limits.captured_tokens:
            raise Refusal(503, "the sessions hold as many tokens as they may together", retry_after_s=30)
        return session

    def known(self, name: str, holder: str) -> Session | None:
        """The session, if this holder has one of that name."""
        self._expire()
        return self._sessions.get((holder, name))

    def find(self, name: str, holder: str) -> Session:
        """The session.

        Raises:
            Refusal: this holder has none of that name.
        """
        session = self.known(name, holder)
        if session is None:
            raise Refusal(404, f"there is no session {name!r}")
        return session

    def add(self, session: Session, prompt: TurnPrompt, generation: Generation, message: Message) -> None:
        """Write a finished turn down, unless the session was ended meanwhile."""
        if self._sessions.get((session.holder, session.name)) is session:
            self.tokens += session.add(prompt, generation, message)
            session.touched_s = self._clock()

    @contextmanager
    def closing(self, session: Session) -> Iterator[None]:
        """The session takes no request while the block runs, and is forgotten when that succeeds.

        Raises:
            Refusal: a request of it is under way, or it is ending already.
        """
        self._must_rest(session)
        session.ending = True
        try:
            yield
        except BaseException:
            session.ending = False
            raise
        self._forget(session)

    def end(self, session: Session) -> None:
        """Forget the session.

        Raises:
            Refusal: a request of it is under way, or it is ending already.
        """
        self._must_rest(session)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.holder, session.name]
        self.tokens -= session.tokens

    @staticmethod
    def _must_rest(session: Session) -> None:
        if session.requests:
            raise Refusal(409, f"{session.requests} requests of session {session.name!r} are under way")
        if session.ending:
            raise Refusal(409, f"session {session.name!r} is being handed on with its reward")

    def _expire(self) -> None:
        now = self._clock()
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.requests or session.ending or now - session.touched_s <= self._limits.session_idle_s:
                return
            self.end(session)
            self.expired += 1
