"""The law of futures: ``f.op(x).result()`` equals ``f.result().op(x)``, for programs of operations, on both backends.

A program is a list of instructions over registers. It runs twice: on futures, lazily, and on batches, at once. In the
end every register holds the same batch or the same error on both sides, nothing that was there before has changed, and
no two results share memory. Programs are drawn by hypothesis as short strings of bytes, so that thousands take seconds.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.data import DataProto, DataProtoFuture, gather
from asyncrl.errors import AsyncRLError, SchemaError, UserCodeError
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Worker, WorkerGroup, register
from asyncrl.single_controller.local import LocalWorkerGroup

TIMEOUT_S = 100.0
EXAMPLES = {"current": 4200, "threads": 800, "ray": 320}
"""Programs on each backend: in this process on one loop (a fifth of them where slow tests are left out), in threads,
on Ray."""

ERRORS = (AsyncRLError, IndexError, TypeError)
"""What operations on batches raise."""


class Copier(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def copy(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scribble(self, batch: DataProto) -> DataProto:
        """Write into what was received, and tell."""
        return scribbled(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def twice(self, batch: DataProto) -> DataProto:
        """Two rows for each."""
        return batch.repeat(2)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, pad=False, read_only=True)
    async def read(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def whole(self, batch: DataProto) -> DataProto:
        """One rank gets all rows."""
        return batch


# ------------------------------------------------------------------------------------------------ functions of rows


def scribbled(batch: DataProto) -> DataProto:
    """Write into column x, if there is one."""
    if batch.batch is not None and "x" in batch.batch:
        batch.batch["x"].add_(100)
    return batch


def marked(batch: DataProto) -> DataProto:
    batch.meta_info["marked"] = True
    return batch.with_columns(mark=np.array(["new"] * len(batch), dtype=object))


def narrowed(batch: DataProto) -> DataProto:
    """Every second column, so to say."""
    return batch.select([] if batch.batch is None else sorted(map(str, batch.batch.keys()))[::2])


def refusing(batch: DataProto) -> DataProto:
    raise ValueError("no")


def losing(batch: DataProto) -> DataProto:
    """Not one row for each, unless there is none."""
    return batch[:-1]


FUNCTIONS = [scribbled, marked, narrowed, refusing, losing]


def applied(function: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
    """What ``then`` means for a batch."""
    try:
        result = function(batch.clone())
    except ValueError as error:
        raise UserCodeError("the function raised") from error
    if len(result) != len(batch):
        raise SchemaError("not one row for each")
    return result


# ------------------------------------------------------------------------------------------------------------ batches


@functools.cache
def make(kind: int, rows: int, run: int) -> DataProto:
    """Batches of several kinds: dense, ragged, zero-width, boolean, NaN, numbers, text and objects; some without."""
    lengths = [number % 3 for number in range(rows)]
    tensors: dict[str, Any] = {
        "x": torch.arange(rows) + 10 * run,
        "y": torch.arange(2.0 * rows).reshape(rows, 2),
        "ids": torch.nested.nested_tensor_from_jagged(
            torch.arange(sum(lengths)), torch.tensor([0, *np.cumsum(lengths).tolist()])
        ),
    }
    arrays: dict[str, Any] = {"name": np.array([f"row {number}" for number in range(rows)], dtype=object)}
    if kind == 1:
        tensors = {"x": tensors["x"], "empty": torch.zeros(rows, 0), "flag": torch.arange(rows) % 2 == 0}
        tensors["nan"] = torch.full((rows,), float("nan"))
        arrays = {"text": np.array(["ab"] * rows, dtype="<U2"), "grid": np.arange(4 * rows).reshape(rows, 2, 2)}
    elif kind == 2:
        tensors = {}
        arrays["nested"] = np.empty(rows, dtype=object)
        for number in range(rows):
            arrays["nested"][number] = {"answer": [number, None], "array": np.arange(number)}
    elif kind == 3:
        arrays = {}
    return DataProto.from_dict(tensors, arrays, meta_info={"run": 1, "weight_version": 3}, auto_padding=rows % 2 == 1)


@functools.cache
def pristine(kind: int, rows: int, run: int) -> DataProto:
    """The same, to compare with: the first may be changed by mistake."""
    return make(kind, rows, run).clone()


# ----------------------------------------------------------------------------------------------------------- programs


class Dice:
    """Choices read off a string of bytes: all zeros are the simplest program."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def below(self, count: int) -> int:
        return next(self._bytes, 0) % count

    def between(self, least: int, most: int) -> int:
        return least + self.below(most - least + 1)

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]

    def some(self, options: Sequence[str]) -> list[str]:
        chosen = self.below(2 ** len(options))
        return [option for number, option in enumerate(options) if chosen >> number & 1]


@dataclass(frozen=True)
class Instruction:
    """An operation on registers: what it does to futures, and what to batches. It may fill several registers."""

    text: str
    sources: tuple[int, ...]
    on_futures: Callable[..., Any]
    on_batches: Callable[..., Any]
    argument_error: bool = False
    """The arguments are wrong whatever the batch: futures raise at once."""
    waits: bool = False
    """The first source has to be finished before."""


Decoder: TypeAlias = Callable[[Dice, "tuple[int, ...]", Any, WorkerGroup], Instruction]
"""Reads an operation, on these registers, the first of which holds this batch or error."""


def one(text: str, sources: tuple[int, ...], operation: Callable[..., Any], **more: Any) -> Instruction:
    """The same on both."""
    return Instruction(text, sources[:1], operation, operation, **more)


def _slice(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    start, end = (dice.pick([None, 0, 1, 2, 5, 9, -1, -3, -9]) for _ in range(2))
    step = dice.pick([None, 1, 2, 3, -1, -2])
    return one(f"slice {start}:{end}:{step}", sources, lambda f: f.slice(start, end, step))


def _item(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    start, end = dice.between(0, 4), dice.between(0, 6)
    return one(f"[{start}:{end}]", sources, lambda f: f[start:end])


def _index(dice: Dice, batch: Any) -> Any:
    """Mostly rows that there are; integers and booleans of several types, now and then wrong ones."""
    rows = len(batch) if isinstance(batch, DataProto) else 3
    kind = dice.below(12)
    if kind == 11:
        return dice.pick([[0.5], [rows], [-rows - 1], [True] * (rows + 1)])
    if kind in (3, 7):
        return np.array([dice.below(2) == 0 for _ in range(rows)], dtype=bool)
    numbers = [dice.between(-rows, rows - 1) for _ in range(dice.below(6))] if rows else []
    if kind in (1, 5):
        return np.array(numbers, dtype=np.int64)
    return torch.tensor(numbers, dtype=torch.int32) if kind in (2, 6) else numbers


def _select_idxs(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    index = _index(dice, batch)
    return one(f"select_idxs {index!r}", sources, lambda f: f.select_idxs(index))


def _reorder(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    index = _index(dice, batch)

    def on_batch(given: DataProto) -> DataProto:
        again = given.select()
        again.reorder(index)
        return again

    return Instruction(f"reorder {index!r}", sources[:1], lambda f: f.reorder(index), on_batch)


def _repeat(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    times, interleave = dice.pick([2, 0, 1, 3, -1]), bool(dice.below(2))
    return one(f"repeat {times} {interleave}", sources, lambda f: f.repeat(times, interleave), argument_error=times < 0)


def _chunk(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    chunks = dice.pick([2, 1, 3, 0])
    return one(f"chunk {chunks}", sources, lambda f: f.chunk(chunks), argument_error=chunks < 1)


def _split(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    size = dice.pick([2, 1, 3, 4, 0])
    return one(f"split {size}", sources, lambda f: f.split(size), argument_error=size < 1, waits=True)


def _keys(dice: Dice, batch: Any) -> list[list[str] | None]:
    """Names of tensors, arrays and entries; mostly such as are there."""
    given = batch if isinstance(batch, DataProto) else make(0, 0, 0)
    tensors = [] if given.batch is None else sorted(map(str, given.batch.keys()))
    chosen: list[list[str] | None] = []
    for names in (tensors, sorted(given.non_tensor_batch), sorted(given.meta_info)):
        kind = dice.below(20)
        chosen.append(None if kind % 3 == 0 else ["nothing"] if kind == 19 else dice.some(names))
    return chosen


def _select(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    keys = _keys(dice, batch)
    return one(f"select {keys}", sources, lambda f: f.select(*keys))


def _pop(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    keys = _keys(dice, batch)

    def on_batch(given: DataProto) -> tuple[DataProto, DataProto]:
        rest = given.select()
        return rest.pop(*keys), rest

    return Instruction(f"pop {keys}", sources[:1], lambda f: f.pop(*keys), on_batch)


def _rename(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    names = batch.columns().names if isinstance(batch, DataProto) and batch.columns().names else ["x"]
    name = dice.pick(names)
    old, new = dice.pick(
        [([name], ["v"]), (names[:2], names[:2][::-1]), (name, "u"), ("x", "y"), ("nothing", "x"), ([name], ["a", "b"])]
    )
    return Instruction(
        f"rename {old} {new}", sources[:1], lambda f: f.rename(old, new), lambda d: d.select().rename(old, new)
    )


def _union(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    return Instruction("union", sources[:2], lambda f, g: f.union(g), lambda d, e: d.select().union(e))


def _widen(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    """A union that fits, where there is a column x."""

    def widened(given: Any) -> Any:
        left = given.select() if isinstance(given, DataProto) else given
        return left.union(given.select(["x"], []).rename("x", "w"))

    return one("widen", sources, widened)


def _concat(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    return Instruction(
        "concat", sources, lambda *each: DataProtoFuture.concat(each), lambda *each: DataProto.concat(each)
    )


def _then(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    function = dice.pick(FUNCTIONS)
    return Instruction(
        f"then {function.__name__}", sources[:1], lambda f: f.then(function), lambda d: applied(function, d)
    )


def _hand(dice: Dice, sources: tuple[int, ...], batch: Any, group: WorkerGroup) -> Instruction:
    method, meaning = dice.pick(
        [
            ("copy", lambda d: d),
            ("scribble", lambda d: scribbled(d.clone())),
            ("twice", lambda d: d.repeat(2)),
            ("read", lambda d: d),
            ("whole", lambda d: d),
        ]
    )
    return Instruction(f"hand to {method}", sources[:1], getattr(group, method), meaning)


DECODERS: list[Decoder] = [
    _slice,
    _hand,
    _select_idxs,
    _then,
    _select,
    _pop,
    _rename,
    _widen,
    _union,
    _concat,
    _chunk,
    _split,
    _repeat,
    _reorder,
    _item,
]

Settle: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Wait for a future, as the backend does it."""


@dataclass
class Registers:
    """What a program has made so far, on both sides: a future and a batch, or errors."""

    futures: list[Any]
    batches: list[Any]
    untouched: list[DataProto]
    unsound: set[int]
    """What fails because of some rows: a union with differing values, a function that loses rows. What is taken of them
    later need not contain these rows."""
    text: list[str]


async def execute(program: bytes, group: WorkerGroup, settle: Settle, *, most: int, bases: Registers) -> Registers:
    """Run a program on the registers ``bases`` and at most ``most`` instructions."""
    dice = Dice(program)
    state = Registers(list(bases.futures), list(bases.batches), [], set(), list(bases.text))
    for _ in range(dice.between(1, most)):
        decoder = dice.pick(DECODERS)
        usable = [number for number in range(len(state.batches)) if number not in state.unsound]
        # Newer ones first, so that operations pile up.
        sources = tuple(usable[-1 - dice.below(len(usable))] for _ in range(1 + dice.below(3)))
        if len(sources) == 1:
            sources *= 2
        await step(decoder(dice, sources, state.batches[sources[0]], group), state, settle)
    return state


async def step(instruction: Instruction, state: Registers, settle: Settle) -> None:
    """One instruction, on both sides."""
    state.text.append(f"{instruction.text} of {instruction.sources}")
    given = [state.batches[source] for source in instruction.sources]
    futures = [state.futures[source] for source in instruction.sources]
    failed = next((each for each in given if isinstance(each, BaseException)), None)
    if instruction.waits:
        if failed is not None:
            return  # it cannot be waited for
        await settle(futures[0])
    made: Any
    try:
        made = failed if failed is not None else instruction.on_batches(*given)
    except ERRORS as error:
        made = error
    if instruction.argument_error:
        with pytest.raises(type(made) if failed is None else SchemaError):
            instruction.on_futures(*futures)
        return
    results = instruction.on_futures(*futures)
    several = list(results) if isinstance(results, list | tuple) else [results]
    if isinstance(made, BaseException):
        if failed is None and (instruction.text == "then losing" or str(made).startswith("column")):
            state.unsound.add(len(state.batches))
        batches = [made] * len(several)
    else:
        batches = list(made) if isinstance(made, list | tuple) else [made]
    for future, batch in zip(several, batches, strict=True):
        state.futures.append(future)
        state.batches.append(batch)


async def compare(state: Registers, settle: Settle, *, together: bool) -> None:
    """Every register is the same on both sides, and no result shares memory with another."""
    expected = [each if isinstance(each, BaseException) else each.clone() for each in state.batches]
    good = [number for number, each in enumerate(expected) if not isinstance(each, BaseException)]
    if together:
        for number, found in zip(good, await settle(gather(*(state.futures[each] for each in good))), strict=True):
            assert found == expected[number], (state.text, number)
    for number, (future, batch) in enumerate(zip(state.futures, expected, strict=True)):
        if isinstance(batch, BaseException):
            with pytest.raises(type(batch)):
                await settle(future)
            continue
        found = await settle(future)
        assert found == batch, (state.text, number, found, batch)
        assert found.is_padding_enabled() == batch.is_padding_enabled() or "then" in str(state.text), state.text
        assert len(future) == len(batch), (state.text, number)
        overwrite(found)


def overwrite(batch: DataProto) -> None:
    """Spoil every column: whoever shares its memory will show it."""
    for value in () if batch.batch is None else batch.batch.values():
        (value.values() if value.is_nested else value).zero_()
    for array in batch.non_tensor_batch.values():
        array[...] = None if array.dtype == object else np.zeros((), dtype=array.dtype)
    batch.meta_info.clear()


def bases_of(dice: Dice, group: WorkerGroup) -> Registers:
    """One or two batches to begin with: from a call, or at hand."""
    state = Registers([], [], [], set(), [])
    for number in range(dice.between(1, 2)):
        kind, rows, source = dice.below(4), dice.below(7), dice.below(3)
        batch = make(kind, rows, number)
        state.untouched.append(pristine(kind, rows, number))
        state.text.append(f"{rows} rows of kind {kind} from {source}")
        future = [lambda b: group.copy(b), DataProtoFuture.of, lambda b: group.whole(b)][source](batch)
        state.futures.append(future)
        state.batches.append(batch)
    return state


def run_blocking(coroutine: Coroutine[Any, Any, None]) -> None:
    """A coroutine that blocks the thread instead of suspending."""
    with pytest.raises(StopIteration):
        coroutine.send(None)
    coroutine.close()


async def wait_here(future: Any) -> Any:
    return await future


async def wait_blocking(future: Any) -> Any:
    return future.result(TIMEOUT_S)


async def example(first: bytes, programs: Sequence[bytes], group: WorkerGroup, settle: Settle, *, most: int) -> None:
    """Programs over the same first batches."""
    dice = Dice(first)
    bases = bases_of(dice, group)
    together, finished = bool(dice.below(2)), bool(dice.below(2))
    if finished:
        for future in bases.futures:
            await settle(future)
    ends = [await execute(program, group, settle, most=most, bases=bases) for program in programs]
    for number, end in enumerate(ends):
        if number:
            # The bases are read once: reading them spoils them.
            end.futures, end.batches = end.futures[len(bases.futures) :], end.batches[len(bases.futures) :]
        await compare(end, settle, together=together)
    # Nothing was changed in place.
    assert bases.batches == bases.untouched


def law(
    backend: str, body: Callable[[bytes, list[bytes]], None], *, programs: int, length: int, share: float = 1
) -> None:
    """Try ``body`` on a ``share`` of the examples of a backend: always the same; above 1, others each time."""

    @settings(
        max_examples=int(EXAMPLES[backend] * share) // programs,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=share <= 1,
        database=None,
    )
    @given(
        first=st.binary(min_size=9, max_size=9), drawn=st.binary(min_size=programs * length, max_size=programs * length)
    )
    def examples(first: bytes, drawn: bytes) -> None:
        body(first, [drawn[start : start + length] for start in range(0, len(drawn), length)])
        nonlocal ran
        ran += programs

    ran = 0
    examples()
    assert ran >= int(EXAMPLES[backend] * share)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "share",
    [
        0.1,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(5, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_on_one_loop(share: float) -> None:
    with asyncio.Runner() as runner:

        async def start() -> WorkerGroup:
            group = LocalWorkerGroup(ClassWithInitArgs(Copier), world_size=3, loop="current")
            await group.ready()
            return group

        group = runner.run(start())
        law(
            "current",
            lambda first, programs: runner.run(example(first, programs, group, wait_here, most=5)),
            programs=4,
            length=48,
            share=share,
        )
        runner.run(group.aclose())


def test_in_threads() -> None:
    with LocalWorkerGroup(ClassWithInitArgs(Copier), world_size=2) as group:
        law(
            "threads",
            lambda first, programs: run_blocking(example(first, programs, group, wait_blocking, most=4)),
            programs=4,
            length=40,
        )


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_on_ray() -> None:
    import ray.cloudpickle

    from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Copier)) as group:
        law(
            "ray",
            lambda first, programs: run_blocking(example(first, programs, group, wait_blocking, most=3)),
            programs=8,
            length=30,
        )
