"""Sessions: what was sampled for one agent, kept as it was sampled, until a reward turns it into trajectories.

A session is a tree. A request whose messages (or ids) begin with those of an earlier one *and its answer* continues
from there: its prompt is exactly the ids of that turn and what the new messages add. Anything else begins a new branch,
so an agent may sample several answers, go back, or hold side conversations. The whole tree becomes one trajectory
(:mod:`asyncrl.rollout.branches`), in which each turn is once. It is held in memory: 16 bytes per token.

The trajectories of a rewarded session go to a folder of batches or to a replay buffer, in groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import pickle
import time
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from asyncrl.errors import BufferClosedError, ConfigError
from asyncrl.interfaces import FinishReason, Generation, GroupSummary, Message, ReplayBuffer, Task, Tool
from asyncrl.rollout.trajectory import Trajectory, Turn, trajectories_to_batch
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import Limits
from asyncrl.serve.text import ModelText

_log = logging.getLogger(__name__)
_canonical = msgspec.json.Encoder(order="deterministic")


# ---------------------------------------------------------------------------------------------- the tree of turns


def _digests(messages: Sequence[Message], *, after: bytes) -> list[bytes]:
    """Return one digest per message, of the whole conversation up to and including it.

    The ids of calls do not count, nor the assistant's name, so an answer is recognised when a client sends it back.
    """
    digests = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
        said = (content.strip(), "") if role == "assistant" else (content, message.get("name") or "")
        identity = _canonical.encode([role, *said, calls])
        after = hashlib.blake2b(after + identity, digest_size=16).digest()
        digests.append(after)
    return digests


class _Node:
    """One turn: what was appended before it, what was sampled, and the turn it continues from."""

    __slots__ = (
        *("appended", "children", "finish_reason", "log_probs", "message", "number", "parent", "sampled", "versions"),
    )

    def __init__(
        self, parent: _Node | None, appended: Sequence[int], generation: Generation, message: Message, *, number: int
    ) -> None:
        self.parent = parent
        self.number = number
        self.appended = array("i", appended)
        self.sampled = array("i", generation.token_ids)
        self.log_probs = array("f", generation.log_probs)
        self.versions = array("i", generation.weight_versions)
        self.finish_reason: FinishReason = generation.finish_reason
        self.message = message
        self.children = 0

    def path(self) -> list[_Node]:
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
    """The prompt of a turn, and its place in the session.

    Attributes:
        parent: the turn whose ids it begins with; None begins a branch.
        appended: the ids after those.
        digest: of the conversation; empty for a prompt of ids.
    """

    token_ids: tuple[int, ...]
    parent: _Node | None = field(repr=False)
    appended: tuple[int, ...] = field(repr=False)
    digest: bytes = field(repr=False)


class Session:
    """One agent's conversation, or several that belong together.

    Only the ``holder`` of the key that created it has access. ``requests`` are running; it takes none while it is
    ``ending``: being stored.
    """

    def __init__(self, name: str, holder: str) -> None:
        self.name = name
        self.holder = holder
        self.requests = 0
        self.ending = False
        self.used_at_s = 0.0
        self.tokens = 0
        self._by_digest: dict[bytes, list[_Node]] = {}
        self._nodes: list[_Node] = []
        self._following: defaultdict[int, list[_Node]] = defaultdict(list)  # by number of the turn before; -1: none
        self._leaves: dict[_Node, None] = {}  # a set that remembers its order

    def check_open(self) -> None:
        """Raise an API error while the session is ending."""
        if self.ending:
            raise APIError(409, f"session {self.name!r} is being stored with its reward")

    @property
    def turns(self) -> int:
        return len(self._nodes)

    @property
    def branches(self) -> int:
        """Number of leaves of the tree."""
        return len(self._leaves)

    @property
    def branch_tokens(self) -> int:
        """Number of tokens of all branches; those that several share count for each."""
        ends: list[int] = []
        for node in self._nodes:
            before = 0 if node.parent is None else ends[node.parent.number]
            ends.append(before + len(node.appended) + len(node.sampled))
        return sum(ends[leaf.number] for leaf in self._leaves)

    @property
    def roots(self) -> int:
        """Number of turns that continue no other: conversations that could not be joined to one before."""
        return len(self._following[-1])

    def chat_prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], text: ModelText, *, generation_prompt: bool = True
    ) -> TurnPrompt:
        """Return the prompt of the turn after ``messages``, appended to the turn that it continues, if any."""
        declared = _canonical.encode(([tool.schema() for tool in tools], text.renderer.options))
        digests = _digests(messages, after=hashlib.blake2b(declared, digest_size=16).digest())
        for at in range(len(messages) - 1, 0, -1):
            nodes = self._by_digest.get(digests[at])
            if messages[at]["role"] != "assistant" or not nodes:
                continue
            node = min(nodes, key=lambda each: each.children)  # of equal answers one that nothing follows yet
            appended = tuple(
                text.extend(messages[:at], node.sampled, messages[at + 1 :], tools, generation_prompt=generation_prompt)
            )
            ids = (*node.token_ids(), *appended)
            return TurnPrompt(token_ids=ids, parent=node, appended=appended, digest=digests[-1])
        ids = tuple(text.renderer.prompt(messages, tools, generation_prompt=generation_prompt))
        return TurnPrompt(token_ids=ids, parent=None, appended=ids, digest=digests[-1])

    def token_prompt(self, token_ids: tuple[int, ...]) -> TurnPrompt:
        """Return the place of a prompt given as ids: after the longest turn whose ids it begins with."""
        given = array("i", token_ids)
        best: _Node | None = None
        length = 0
        left = [(node, 0) for node in self._following[-1]]
        while left:
            node, begin = left.pop()
            answer = begin + len(node.appended)
            end = answer + len(node.sampled)
            if end > len(given) or given[begin:answer] != node.appended or given[answer:end] != node.sampled:
                continue
            # of equal answers one that nothing follows yet
            if best is None or (-end, node.children, node.number) < (-length, best.children, best.number):
                best, length = node, end
            left += [(each, end) for each in self._following.get(node.number, ())]
        return TurnPrompt(token_ids=token_ids, parent=best, appended=token_ids[length:], digest=b"")

    def add(self, prompt: TurnPrompt, generation: Generation, message: Message) -> int:
        node = _Node(prompt.parent, prompt.appended, generation, message, number=len(self._nodes))
        self._nodes.append(node)
        self._following[-1 if prompt.parent is None else prompt.parent.number].append(node)
        if prompt.parent is not None:
            prompt.parent.children += 1
            self._leaves.pop(prompt.parent, None)
        if prompt.digest:
            (digest,) = _digests([message], after=prompt.digest)
            self._by_digest.setdefault(digest, []).append(node)
        self._leaves[node] = None
        tokens = len(node.appended) + len(node.sampled)
        self.tokens += tokens
        return tokens

    def said(self) -> list[tuple[Message, int]]:
        """Return the message of each turn, and the number of the turn that it continues (-1: none)."""
        return [(node.message, -1 if node.parent is None else node.parent.number) for node in self._nodes]

    def trajectory(
        self,
        *,
        task: Task,
        reward: float,
        info: Mapping[str, object],
        turn_rewards: Sequence[float] = (),
        max_seq_len: int | None = None,
    ) -> Trajectory:
        """Return the session as one trajectory, its turns in the order in which they ended.

        Tokens with a version below 0 were not sampled from the policy as it is: they count as context. ``turn_rewards``
        are those of all turns; without them no turn has one of its own. It ends with ``max_seq_len`` if its last turn
        was cut where its branch has so many tokens.
        """
        ids, log_probs, versions = array("i"), array("f"), array("i")
        mask: list[bool] = []
        turns: list[Turn] = []
        nodes = tuple(self._nodes)  # a turn may be added while this runs in a thread
        line = all(node.parent is (nodes[node.number - 1] if node.number else None) for node in nodes)
        for node in nodes:
            ids += node.appended
            log_probs.extend([0.0] * len(node.appended))
            versions.extend([-1] * len(node.appended))
            mask += [False] * len(node.appended)
            own = [version >= 0 for version in node.versions]
            turns.append(
                Turn(
                    start=len(ids),
                    end=len(ids) + len(node.sampled),
                    finish_reason=node.finish_reason,
                    message=node.message,
                    reward=turn_rewards[node.number] if turn_rewards else 0.0,
                    parent=None if line else -1 if node.parent is None else node.parent.number,
                )
            )
            ids += node.sampled
            log_probs.extend(value if mine else 0.0 for value, mine in zip(node.log_probs, own, strict=True))
            versions += node.versions
            mask += own
        full = max_seq_len is not None and len(nodes[-1].token_ids()) >= max_seq_len
        return Trajectory(
            task=task,
            token_ids=tuple(ids),
            loss_mask=tuple(mask),
            behaviour_log_probs=tuple(log_probs),
            weight_versions=tuple(versions),
            reward=reward,
            turns=tuple(turns),
            finish_reason="max_seq_len" if full and turns[-1].finish_reason == "length" else "done",
            info=info,
        )


class Sessions:
    """All sessions, by holder and name, the least recently used first; ``tokens`` counts those of all of them.

    The bounds per key hold where ``several_keys`` are served, and refuse new sessions only.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._count_by_holder: Counter[str] = Counter()
        self._tokens_by_holder: Counter[str] = Counter()
        self.several_keys = False
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def use(self, name: str, holder: str) -> Session:
        """Return the session, created if need be, for a request until :meth:`leave`; an API error beyond a bound."""
        limits, session = self._limits, self.get(name, holder)
        if self.tokens >= limits.captured_tokens:
            raise APIError(
                503, f"all sessions together hold {self.tokens} tokens: reward or drop some", retry_after_s=30
            )
        if session is None:
            if len(self) >= limits.sessions:
                raise APIError(
                    503, f"{len(self)} sessions are held, no more fit: reward or drop some", retry_after_s=30
                )
            count, tokens = self._count_by_holder[holder], self._tokens_by_holder[holder]
            if self.several_keys and (count >= limits.sessions_per_key or tokens >= limits.captured_tokens_per_key):
                held = f"{count} sessions with {tokens} tokens"
                raise APIError(429, f"this key has {held}, no more fit: reward or drop some", retry_after_s=30)
            session = self._sessions[holder, name] = Session(name, holder)
            self._count_by_holder[holder] = count + 1
        self._touch(session)
        session.check_open()
        if session.tokens >= limits.session_tokens:
            raise APIError(
                409, f"session {name!r} holds {session.tokens} tokens; at most {limits.session_tokens}: reward it"
            )
        session.requests += 1
        return session

    def leave(self, session: Session) -> None:
        """End a request of the session; drop the session if it has no other, and nothing was sampled in it."""
        session.requests -= 1
        if not session.requests and not session.turns:
            self._remove(session)

    def get(self, name: str, holder: str) -> Session | None:
        self._drop_expired()
        return self._sessions.get((holder, name))

    def find(self, name: str, holder: str) -> Session:
        """Return the session; an API error if this holder has none of that name."""
        session = self.get(name, holder)
        if session is None:
            raise _no_session(name)
        return session

    def add(self, session: Session, prompt: TurnPrompt, generation: Generation, message: Message) -> None:
        """Add a finished turn, unless the session has ended in the meantime."""
        if self._sessions.get((session.holder, session.name)) is session:
            tokens = session.add(prompt, generation, message)
            self.tokens += tokens
            self._tokens_by_holder[session.holder] += tokens
            self._touch(session)

    def _touch(self, session: Session) -> None:
        self._sessions.move_to_end((session.holder, session.name))
        session.used_at_s = self._clock()

    @contextlib.contextmanager
    def ending(self, session: Session) -> Iterator[None]:
        """Keep requests out of the session while the block runs; drop it if that succeeds, else it has been used.

        Raises:
            APIError: it was dropped, a request of the session is running, or it is ending already.
        """
        if self._sessions.get((session.holder, session.name)) is not session:
            raise _no_session(session.name)
        self._check_idle(session)
        session.ending = True
        try:
            yield
        except BaseException:
            session.ending = False
            self._touch(session)
            raise
        self._remove(session)

    def drop(self, session: Session) -> None:
        self._check_idle(session)
        self._remove(session)

    def _remove(self, session: Session) -> None:
        del self._sessions[session.holder, session.name]
        self.tokens -= session.tokens
        for counts, less in ((self._count_by_holder, 1), (self._tokens_by_holder, session.tokens)):
            counts[session.holder] -= less
            if not counts[session.holder]:
                del counts[session.holder]

    @staticmethod
    def _check_idle(session: Session) -> None:
        if session.requests:
            raise APIError(409, f"{session.requests} requests of session {session.name!r} are running")
        session.check_open()

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if now - session.used_at_s <= self._limits.session_idle_s:
                return
            if session.requests or session.ending:
                self._touch(session)
            else:
                self.drop(session)


def _no_session(name: str) -> APIError:
    return APIError(404, f"there is no session {name!r}")


# --------------------------------------------------------------------------------------- where trajectories are kept


class TrajectorySink(Protocol):
    async def put(self, trajectories: Sequence[Trajectory]) -> str:
        """Store one group; return where it is, for people to read."""
        ...


class FolderSink:
    """Writes one file per group, ``{number:08d}.asyncrl``, read back with ``DataProto.load_from_disk``.

    A file is complete or absent. Numbers continue those in the folder, which several servers may write to.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}", path="capture", remedy="give another folder") from error
        self._folder = folder
        numbers = [int(file.stem) for file in folder.glob("*.asyncrl") if file.stem.isdigit()]
        self._next = max(numbers, default=-1) + 1

    async def put(self, trajectories: Sequence[Trajectory]) -> str:
        while True:
            group_id, self._next = self._next, self._next + 1
            file = self._folder / f"{group_id:08d}.asyncrl"
            if await asyncio.to_thread(_save_new, trajectories, group_id, file):
                return file.name


def _save_new(trajectories: Sequence[Trajectory], group_id: int, file: Path) -> bool:
    """Write a group; return False if another server has written, or writes, a file of that name. Blocks."""
    claim = file.with_name(f".{file.stem}.claim")
    try:
        claim.mkdir()
    except FileExistsError:
        return False
    try:
        if file.exists():
            return False
        trajectories_to_batch(trajectories, group_id=group_id).save_to_disk(file)
    finally:
        claim.rmdir()
    return True


class BufferSink:
    """Puts groups into a replay buffer of this process, under ids that follow those it has admitted.

    The buffer admits each group first, within ``admission_timeout_s``, and so holds agents back while it is full.
    """

    def __init__(self, buffer: ReplayBuffer, *, admission_timeout_s: float = 60.0) -> None:
        self._buffer = buffer
        self._next = 0
        self._making = asyncio.Lock()  # one batch at a time: groups are admitted in the order of their ids
        self._timeout_s = admission_timeout_s

    async def put(self, trajectories: Sequence[Trajectory]) -> str:
        async with self._making:
            group_id = max(self._next, self._buffer.statistics().admitted)
            self._next = group_id + 1
            make = partial(trajectories_to_batch, trajectories, group_id=group_id)
            batch = await asyncio.to_thread(make)  # before the admission, since it may fail
        await self._buffer.admit(group_id, timeout_s=self._timeout_s)
        self._buffer.put(GroupSummary(**batch.meta_info["summary"]), batch)
        return f"group_id {group_id}"


@dataclass(slots=True)
class _Group:
    """Rewarded sessions that wait for the other members of their group, and when the last one was added.

    ``members`` are pickled, 18 bytes a token instead of 100. ``reserved`` tokens are expected of all members.
    """

    members: list[bytes] = field(default_factory=list[bytes])
    tokens: int = 0
    reserved: int = 0
    touched_s: float = 0.0

    def add(self, pickled: bytes, *, tokens: int, size: int) -> None:
        self.members.append(pickled)
        self.tokens += tokens
        self.reserved = max(self.tokens, self.reserved or size * tokens)

    def trajectories(self) -> list[Trajectory]:
        return [each for member in self.members for each in pickle.loads(member)]  # noqa: S301  our own


def _named(holder: str, group: str) -> str:
    return f"group {group!r} of {holder!r}" if holder else f"group {group!r}"


class GroupedSink:
    """Collects sessions that name the same group until the group has its size; stores other sessions at once.

    ``sink`` stores whole groups. An incomplete group is stored as it is: ``idle_s`` (an hour) after its last member,
    and when this is closed.

    A group reserves room when it begins: its size times the tokens of its first member, or what it holds if that is
    more. One may begin only while there are fewer than ``groups``, with less than ``tokens`` reserved; where
    ``several_keys`` are served, one has half of either, and counts for no more. A member of a group that has begun is
    never refused; if twice ``tokens`` are held, its group is stored as it is.
    """

    def __init__(
        self,
        sink: TrajectorySink,
        *,
        groups: int = 65_536,
        tokens: int = 1 << 25,
        idle_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._max_groups = groups
        self._max_tokens = tokens
        self._idle_s = idle_s
        self._clock = clock
        self._incomplete: dict[tuple[str, str], _Group] = {}  # by holder and name
        self._groups: Counter[str] = Counter()  # by holder, as the next two
        self._tokens: Counter[str] = Counter()
        self._reserved: Counter[str] = Counter()
        self._storing: asyncio.Task[None] | None = None
        self._puts: set[asyncio.Future[None]] = set()  # under way
        self._closing = asyncio.Event()
        self._closed = False
        self.several_keys = False

    @property
    def incomplete(self) -> int:
        return len(self._incomplete)

    @property
    def tokens(self) -> int:
        return self._tokens.total()

    async def put(self, trajectories: Sequence[Trajectory], *, group: str = "", holder: str = "", size: int = 1) -> str:
        """Store the trajectories of one session, as a member of ``group`` if it has a name; return where they are.

        A group is its ``holder``'s own. If this raises, these trajectories are not stored, and the other members of the
        group still wait.

        Raises:
            APIError: there is no room for another incomplete group.
            InvalidDataError: nothing was sampled in any of the sessions.
            OSError: a folder cannot be written.
            DeadlineError, BufferClosedError: a buffer has had no room in time, or is closed.
        """
        with self.storing():
            return await self._put(trajectories, group, holder, size)

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        """Have :meth:`close` wait for what is done within: the making of what is put, for one."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._puts.add(ended)
        try:
            yield
        finally:
            self._puts.discard(ended)
            ended.set_result(None)

    async def _put(self, trajectories: Sequence[Trajectory], group: str, holder: str, size: int) -> str:
        if not group:
            return await self._sink.put(trajectories)
        pickled = await asyncio.to_thread(pickle.dumps, trajectories)  # first: other members may come meanwhile
        members = len(self._incomplete.get((holder, group), _Group()).members) + 1
        if members == 1 < size:
            self._check_room(holder)
        full = max(self.tokens, self._shares * self._tokens[holder]) >= 2 * self._max_tokens
        waiting = self._take(holder, group)
        if members < size and not full:
            if self._closed:
                self._put_back(holder, group, waiting)
                raise BufferClosedError(f"{_named(holder, group)} has {members} of {size} members, and cannot wait")
            waiting.add(pickled, tokens=sum(len(each.token_ids) for each in trajectories), size=size)
            waiting.touched_s = self._clock()
            self._put_back(holder, group, waiting)
            return f"group {group}: {members} of {size}"
        if members < size:
            _log.warning("%s is stored with %d of %d members: too much waits", _named(holder, group), members, size)
        try:
            return await self._sink.put([*await asyncio.to_thread(waiting.trajectories), *trajectories])
        except BaseException:
            waiting.touched_s = self._clock()  # this member comes again
            self._put_back(holder, group, waiting)
            raise

    async def close(self, *, deadline_s: float = 10.0) -> None:
        """Store the incomplete groups, after the puts under way; log those that are not stored as lost.

        That takes ``deadline_s`` at most. A put that ends later stores its group, or raises.
        """
        self._closing.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                if self._storing is not None and not self._storing.done():
                    await self._storing  # while there is time: if it were cancelled, its group would be stored twice
                while self._puts:
                    await asyncio.wait(self._puts)
                await self._flush(before_s=math.inf)
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        """Log the groups that wait as lost: nothing stores them any more."""
        for holder, name in list(self._incomplete):
            group = self._take(holder, name)
            _log.error("%s is lost: %d sessions, %d tokens", _named(holder, name), len(group.members), group.tokens)

    async def _store_idle(self) -> None:
        """Store groups whenever some are idle, until there are none or this is closed."""
        while self._incomplete:
            first_s = min(group.touched_s for group in self._incomplete.values())
            wait_s = max(first_s + self._idle_s - self._clock(), min(self._idle_s, 1.0))  # for others that are due soon
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closing.wait()
                return
            await self._flush(before_s=self._clock() - self._idle_s)

    async def _flush(self, *, before_s: float) -> None:
        """Store the groups whose last member came by ``before_s``."""
        for holder, name in [key for key, group in self._incomplete.items() if group.touched_s <= before_s]:
            due = self._incomplete.get((holder, name))
            if due is None or due.touched_s > before_s:  # it has been completed in the meantime, perhaps begun again
                continue
            group = self._take(holder, name)
            what = _named(holder, name)
            try:
                kept = await self._sink.put(await asyncio.to_thread(group.trajectories))
                _log.warning("incomplete %s is stored with %d members (%s)", what, len(group.members), kept)
            except BaseException as error:
                group.touched_s = self._clock()
                self._put_back(holder, name, group)
                if not isinstance(error, Exception):
                    raise
                _log.warning("%s could not be stored and still waits: %s", what, error)

    @property
    def _shares(self) -> int:
        """How many times the share of one key fits into the room."""
        return 2 if self.several_keys else 1

    def _check_room(self, holder: str) -> None:
        """Raise an API error if a group of ``holder`` may not begin."""
        most = self._max_tokens // self._shares
        reserved = sum(min(each, most) for each in self._reserved.values())
        for status, who, groups, tokens, shares in (
            (429, "this key has", self._groups[holder], self._reserved[holder], self._shares),
            (503, "all keys have", self.incomplete, reserved, 1),
        ):
            if groups >= self._max_groups // shares or tokens >= self._max_tokens // shares:
                raise APIError(
                    status,
                    f"{who} {groups} incomplete groups, with room reserved for {tokens} tokens; no more may begin: "
                    f"complete some; one that gets no member for {self._idle_s:g} s is stored as it is",
                    retry_after_s=30,
                )

    def _take(self, holder: str, name: str) -> _Group:
        group = self._incomplete.pop((holder, name), None)
        if group is None:
            return _Group()
        self._count(holder, group, sign=-1)
        return group

    def _put_back(self, holder: str, name: str, group: _Group) -> None:
        later = self._take(holder, name)
        group.members += later.members
        group.tokens += later.tokens
        group.reserved = max(group.tokens, group.reserved, later.reserved)
        group.touched_s = max(group.touched_s, later.touched_s)
        if not group.members:
            return
        self._incomplete[holder, name] = group
        self._count(holder, group, sign=1)
        if self._closed:
            self._drop()
        elif self._storing is None or self._storing.done():
            self._storing = asyncio.create_task(self._store_idle(), name="incomplete groups")

    def _count(self, holder: str, group: _Group, *, sign: int) -> None:
        for counts, count in ((self._groups, 1), (self._tokens, group.tokens), (self._reserved, group.reserved)):
            counts[holder] += sign * count
            if not counts[holder]:
                del counts[holder]
