"""Functions as rewards: their arguments, their failures, and the end of their processes."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import uvloop
from blockbuster import blockbuster_ctx

from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, RewardError, SchemaError
from asyncrl.interfaces import RewardModel
from asyncrl.rewards.scoring import ScoringProcess, UserFunction
from asyncrl.runtime import in_own_thread
from asyncrl.single_controller.children import children
from asyncrl.single_controller.liveness import Liveness
from engines.reward.function import FunctionReward

Module = Callable[[str], str]

linux = pytest.mark.skipif(sys.platform != "linux", reason="what is stopped is read from /proc")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Module:
    """Write a module of reward functions; returns its name."""

    def write(source: str) -> str:
        name = f"rewards_{abs(hash(request.node.nodeid))}"
        (tmp_path / f"{name}.py").write_text(dedent(source))
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return write


@asynccontextmanager
async def rewarding(**options: Any) -> AsyncIterator[FunctionReward]:
    reward = FunctionReward(**options)
    try:
        yield reward
    finally:
        await reward.close()


def batch(answers: list[str], **columns: Any) -> DataProto:
    """Rows of a prompt of two tokens, then one sampled token per character, an environment's token, a sampled one."""
    rows = [[1, 2, *map(ord, answer), 3, 4] for answer in answers]
    versions = [[-1, -1, *[5] * len(answer), -1, 6] for answer in answers]
    return DataProto.from_dict(
        tensors={
            "input_ids": [torch.tensor(row) for row in rows],
            "weight_versions": [torch.tensor(row, dtype=torch.int32) for row in versions],
            "group_id": torch.full((len(rows),), 40),
            "row": torch.arange(len(rows)),
        },
        non_tensors={"task": [{"answer": answer.upper()} for answer in answers], **columns},
    )


async def scores(reward: FunctionReward, rows: DataProto) -> list[float]:
    scored = await reward.score(rows)
    assert scored.batch is not None
    assert scored.batch["rewards"].dtype == torch.float32
    column: list[float] = scored.batch["rewards"].tolist()
    return column


def alive(pid: int) -> bool:
    """Whether a thread of ``pid`` runs; an unreaped zombie does not."""
    try:
        states = [
            (thread / "stat").read_text().rpartition(")")[2].split()[0]
            for thread in Path(f"/proc/{pid}/task").iterdir()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}").exists() and alive(pid)  # a thread ended between listing and reading
    return any(state != "Z" for state in states)


async def gone(pid: int) -> bool:
    """Whether ``pid`` ends within ten seconds. A signal is delivered by the kernel when it likes."""
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        await asyncio.to_thread(os.sched_yield)
    return not alive(pid)


async def test_parameter_names_select_the_arguments(module: Module) -> None:
    name = module(
        """
        def reward(token_ids, task, level=0):
            return sum(token_ids) + 1000 * level + (0.5 if task["answer"] == "AB" else 0)
        """
    )
    async with rewarding(function=f"{name}:reward") as reward:
        _: RewardModel = reward
        # sampled: the characters and the closing 4; neither prompt nor environment
        assert await scores(reward, batch(["ab", "c"])) == [97 + 98 + 4 + 0.5, 99 + 4]
        assert await scores(reward, batch(["ab", "c"], level=[1, 2])) == [1199.5, 2103.0]


async def test_a_function_with_keywords_receives_all_columns(module: Module) -> None:
    name = module(
        """
        def reward(**columns):
            assert sorted(columns) == ["level", "task", "token_ids"], columns
            assert type(columns["level"]) is int, type(columns["level"])
            return columns["level"]
        """
    )
    import numpy as np

    async with rewarding(function=f"{name}:reward") as reward:
        assert await scores(reward, batch(["a", "b"], level=np.array([3, 4]))) == [3.0, 4.0]


async def test_text_is_decoded_from_the_sampled_tokens_only(module: Module, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "What": 1, "is": 2, "it?": 3, "it": 4, "works": 5, "TOOL": 6}
    backend = Tokenizer(models.WordLevel(words, unk_token="What"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path / "tokenizer")
    name = module(
        """
        def reward(completion, prompt):
            assert (prompt, completion) == ("What is it?", "it works"), (prompt, completion)
            return 1
        """
    )
    rows = DataProto.from_dict(
        tensors={
            "input_ids": [torch.tensor([1, 2, 3, 4, 6, 5, 0])],
            "loss_mask": [torch.tensor([False, False, False, True, False, True, True])],
        }
    )
    async with rewarding(function=f"{name}:reward", tokenizer=str(tmp_path / "tokenizer")) as reward:
        assert await scores(reward, rows) == [1.0]


async def test_rows_keep_their_order_in_a_pool_of_processes(module: Module) -> None:
    name = module(
        """
        import os, time
        def reward(token_ids):
            time.sleep(0.02 * (token_ids[0] % 3))
            return token_ids[0]
        def process(token_ids):
            return os.getpid()
        """
    )
    letters = "fedcbagh"
    async with rewarding(function=f"{name}:reward", processes=2) as reward:
        assert await scores(reward, batch(list(letters))) == [float(ord(letter)) for letter in letters]
    async with rewarding(function=f"{name}:process", processes=1) as reward:
        assert len(set(await scores(reward, batch(list(letters))))) == 1  # started once, kept


async def test_a_scoring_process_loads_no_torch_and_runs_the_function_in_its_main_thread(module: Module) -> None:
    name = module(
        """
        import sys, threading
        def reward(task):
            heavy = {"torch", "numpy", "ray", "transformers", "tensordict"} & set(sys.modules)
            assert not heavy, heavy
            return threading.current_thread() is threading.main_thread()
        """
    )
    async with rewarding(function=f"{name}:reward") as reward:
        assert await scores(reward, batch(["a"])) == [1.0]


NO_NUMBER = [
    ("return 1 / 0", "raised\n.*ZeroDivisionError"),
    ("return None", "returned None of type NoneType"),
    ("return '1.0'", "returned '1.0' of type str"),
    ("return [1.0]", r"returned \[1.0\] of type list"),
    ("return float('nan')", "returned nan, which is not a finite float32"),
    ("return -1e300", "returned -1e\\+300, which is not a finite float32"),
]
END_OF_PROCESS = [
    ("raise SystemExit(3)", "raised\n.*SystemExit: 3"),
    ("import os; os._exit(7)", "its process ended with exit code 7"),
    ("import os; os.kill(os.getpid(), 11)", "its process ended by SIGSEGV"),
]


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        *(("def", body, message) for body, message in NO_NUMBER + END_OF_PROCESS),
        *(("async def", body, message) for body, message in NO_NUMBER),
    ],
)
async def test_a_failure_is_an_error_that_names_row_and_function(
    module: Module, kind: str, body: str, message: str
) -> None:
    name = module(
        f"""
        {kind} reward(token_ids):
            if token_ids[0] == ord("x"):
                {body}
            return 1.0
        """
    )
    async with rewarding(function=f"{name}:reward") as reward:
        with pytest.raises(
            RewardError, match=rf"(?s)row 1 \(group_id 40, row 1 of its group\): {name}:reward {message}"
        ):
            await reward.score(batch(["a", "x", "b"]))
        assert await scores(reward, batch(["a", "b"])) == [1.0, 1.0]  # the next batch is none the worse


@pytest.mark.parametrize("returned", ["True", "1", "1.0", "numpy.float32(1)", "numpy.array(1)", "numpy.True_"])
async def test_what_counts_as_a_number(module: Module, returned: str) -> None:
    name = module(
        f"""
        import numpy
        def reward(token_ids):
            return {returned}
        """
    )
    async with rewarding(function=f"{name}:reward") as reward:
        assert await scores(reward, batch(["a"])) == [1.0]


async def test_a_function_that_hangs_is_killed_with_its_children_and_replaced(module: Module, tmp_path: Path) -> None:
    name = module(
        f"""
        import os, pathlib, signal, subprocess, time
        def reward(token_ids):
            if token_ids[0] != ord("x"):
                return os.getpid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen(["sleep", "600"])
            pathlib.Path({str(tmp_path / "pids")!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
            while True:
                pass
        """
    )
    async with rewarding(function=f"{name}:reward", deadline_s=1.0) as reward:
        with pytest.raises(RewardError, match=r"row 0 .*took longer than its deadline of 1 s and was killed"):
            await reward.score(batch(["x"]))
        stuck, child = map(int, (tmp_path / "pids").read_text().split())
        assert await gone(stuck)
        assert await gone(child)
        (successor,) = await scores(reward, batch(["a"]))
        assert successor != stuck


async def test_the_event_loop_is_never_blocked(module: Module) -> None:
    name = module(
        """
        import time
        def reward(token_ids):
            time.sleep(0.3)
            return 1.0
        """
    )
    rows, beats = batch(["a", "b"]), 0
    with blockbuster_ctx():
        async with rewarding(function=f"{name}:reward") as reward:
            scoring = asyncio.ensure_future(reward.score(rows))
            while not scoring.done():
                await asyncio.sleep(0.001)  # a heartbeat, not a wait
                beats += 1
            await scoring
    assert beats > 20  # of several hundred


def test_uvloop_drives_it_too(module: Module) -> None:

    name = module(
        """
        import time
        def reward(token_ids):
            if token_ids[0] == ord("x"):
                time.sleep(600)
            return 2.0
        """
    )

    async def story() -> None:
        async with rewarding(function=f"{name}:reward", processes=2, deadline_s=1.0) as reward:
            assert await scores(reward, batch(["a", "b"])) == [2.0, 2.0]
            with pytest.raises(RewardError, match=r"row 1 .*took longer"):
                await reward.score(batch(["a", "x"]))
            assert await scores(reward, batch(["a", "b"])) == [2.0, 2.0]

    uvloop.run(story())


async def test_cancelling_ends_the_call_and_its_process(module: Module, tmp_path: Path) -> None:
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    name = module(
        f"""
        import os, time
        def reward(token_ids):
            with open({str(fifo)!r}, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
        """
    )
    async with rewarding(function=f"{name}:reward", deadline_s=500) as reward:
        scoring = asyncio.ensure_future(reward.score(batch(["a", "b"])))
        pid = int(await asyncio.to_thread(fifo.read_text))
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert await gone(pid)


async def test_close_ends_running_calls_and_processes(module: Module, tmp_path: Path) -> None:
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    name = module(
        f"""
        import os, time
        def reward(token_ids):
            with open({str(fifo)!r}, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
        """
    )
    reward = FunctionReward(function=f"{name}:reward", deadline_s=500)
    scoring = asyncio.ensure_future(reward.score(batch(["a"])))
    pid = int(await asyncio.to_thread(fifo.read_text))
    await reward.close()
    with pytest.raises(RewardError):
        await scoring
    assert not alive(pid)
    await reward.close()
    with pytest.raises(RewardError, match="after close"):
        await reward.score(batch(["a"]))


async def test_a_process_that_dies_between_two_calls_is_replaced(
    module: Module, caplog: pytest.LogCaptureFixture
) -> None:
    name = module(
        """
        import os
        def reward(token_ids):
            return os.getppid()  # of the process that waits for this one
        """
    )
    async with rewarding(function=f"{name}:reward") as reward:
        (first,) = await scores(reward, batch(["a"]))
        os.kill(int(first), 9)
        assert await gone(int(first))
        (second,) = await scores(reward, batch(["a"]))
        assert second != first
    assert f"scoring process {first:.0f} of {name}:reward died between two calls (by SIGKILL)" in caplog.text


@asynccontextmanager
async def listening(fifo: Path) -> AsyncIterator[asyncio.StreamReader]:
    """The lines that processes write into a pipe of this name, for a minute."""
    os.mkfifo(fifo)
    ours = os.fdopen(os.open(fifo, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
    reader = asyncio.StreamReader()
    made = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), ours)
    try:
        async with asyncio.timeout(60):
            yield reader
    finally:
        made[0].close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_the_death_of_an_idle_process_is_logged_when_it_happens(
    module: Module, caplog: pytest.LogCaptureFixture, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    name = module(
        """
        import os
        def reward(token_ids):
            return os.getppid()  # of the process that waits for this one
        """
    )

    async def story() -> None:
        async with rewarding(function=f"{name}:reward") as reward:
            for _ in range(2):
                (idle,) = await scores(reward, batch(["a"]))
                os.kill(int(idle), signal.SIGKILL)
                async with asyncio.timeout(10):
                    while f"scoring process {idle:.0f} of {name}:reward died between two calls" not in caplog.text:
                        await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(story())


def one_that_waits_to_be_killed(fifo: Path, armed: Path) -> str:
    """A function that, as long as there is a file ``armed``, writes its parent's id to ``fifo`` and does not return."""
    return f"""
        import os, pathlib, time
        def reward(token_ids):
            if pathlib.Path({str(armed)!r}).exists():
                with open({str(fifo)!r}, "w") as file:
                    file.write(f"{{os.getppid()}}\\n")
                time.sleep(600)
            return 2.0
        """


async def test_a_call_whose_process_is_killed_is_repeated(
    module: Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fifo, armed = tmp_path / "started", tmp_path / "armed"
    armed.touch()
    name = module(one_that_waits_to_be_killed(fifo, armed))
    async with listening(fifo) as started, rewarding(function=f"{name}:reward", deadline_s=500) as reward:
        scoring = asyncio.ensure_future(scores(reward, batch(["a", "b"])))
        killed = [int(await started.readline())]
        os.kill(killed[0], signal.SIGKILL)
        killed.append(int(await started.readline()))
        armed.unlink()
        os.kill(killed[1], signal.SIGKILL)
        assert await scoring == [2.0, 2.0]
    assert len(set(killed)) == 2
    for number, pid in enumerate(killed, 1):
        died = f"scoring process {pid} of {name}:reward died during a call (by SIGKILL; death {number})"
        assert died in caplog.text


@pytest.fixture
def watched_closely() -> Iterator[None]:
    children.configure(Liveness(every_s=0.02, named_after_s=0.1, ended_after_s=0.3))
    yield
    children.configure(Liveness())


@linux
@pytest.mark.usefixtures("watched_closely")
@pytest.mark.parametrize("which", ["the process", "its keeper"])
async def test_a_call_whose_process_is_stopped_is_repeated(
    module: Module, tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    fifo, armed = tmp_path / "started", tmp_path / "armed"
    armed.touch()
    name = module(one_that_waits_to_be_killed(fifo, armed))
    async with listening(fifo) as started, rewarding(function=f"{name}:reward", deadline_s=500) as reward:
        scoring = asyncio.ensure_future(scores(reward, batch(["a"])))
        keeper = int(await started.readline())
        armed.unlink()
        os.kill(keeper if which == "its keeper" else child_of(keeper), signal.SIGSTOP)
        assert await asyncio.wait_for(scoring, 30) == [2.0]
    assert f"scoring process {keeper} of {name}:reward has been stopped" in caplog.text
    assert f"scoring process {keeper} of {name}:reward died during a call (by SIGKILL; death 1)" in caplog.text


@linux
async def test_a_process_that_is_stopped_is_not_a_function_that_takes_long(
    module: Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fifo, armed = tmp_path / "started", tmp_path / "armed"
    armed.touch()
    name = module(one_that_waits_to_be_killed(fifo, armed))
    async with listening(fifo) as started, rewarding(function=f"{name}:reward", deadline_s=2.0) as reward:
        scoring = asyncio.ensure_future(scores(reward, batch(["a"])))
        keeper = int(await started.readline())
        armed.unlink()
        os.kill(child_of(keeper), signal.SIGSTOP)
        assert await asyncio.wait_for(scoring, 30) == [2.0]
    assert f"scoring process {keeper} of {name}:reward is stopped at the deadline of its call" in caplog.text


@linux
@pytest.mark.usefixtures("watched_closely")
async def test_an_idle_process_that_is_stopped_is_replaced(module: Module) -> None:
    name = module("""
        import os
        def reward(token_ids):
            return os.getppid()
        """)
    async with rewarding(function=f"{name}:reward") as reward:
        (first,) = await scores(reward, batch(["a"]))
        os.kill(int(first), signal.SIGSTOP)
        async with asyncio.timeout(30):
            while alive(int(first)):
                await asyncio.sleep(0.05)
        assert await scores(reward, batch(["a"])) != [first]


@linux
@pytest.mark.usefixtures("watched_closely")
async def test_a_process_that_is_stopped_before_its_program_begins_is_replaced(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module("""
        def reward(token_ids):
            return 1.0
        """)
    first, started = [True], subprocess.Popen

    def stopped_at_first(*arguments: Any, **keywords: Any) -> subprocess.Popen[bytes]:
        stop = (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if first.pop() else None
        first.append(False)
        return started(*arguments, preexec_fn=stop, **keywords)

    monkeypatch.setattr("asyncrl.rewards.scoring.subprocess.Popen", stopped_at_first)
    process = ScoringProcess(f"{name}:reward", start_deadline_s=60)
    assert await process.call({"token_ids": []}, deadline_s=30) == 1.0
    await process.close()


@linux
async def test_a_death_right_after_the_answer_is_logged(module: Module, caplog: pytest.LogCaptureFixture) -> None:
    name = module("""
        def reward(token_ids):
            return 1.0
        """)
    process = ScoringProcess(f"{name}:reward", start_deadline_s=60)
    assert await process.call({"token_ids": []}, deadline_s=30) == 1.0
    pid = process.pid
    assert pid is not None
    process._unwatch()  # as if the end had been noticed during the call, whose answer was there already
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    await process.close()
    assert f"scoring process {pid} of {name}:reward died between two calls (by SIGKILL)" in caplog.text


def child_of(pid: int) -> int:
    (child,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return child


@pytest.mark.parametrize("how", ["deadline", "answer"])
async def test_a_daemon_of_a_function_ends_with_its_process(module: Module, tmp_path: Path, how: str) -> None:
    name = module(
        f"""
        import os, pathlib, time
        def reward(token_ids):
            reading, writing = os.pipe()
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.write(writing, str(os.getpid()).encode())
                    time.sleep(600)
                os._exit(0)
            pathlib.Path({str(tmp_path / "pid")!r}).write_bytes(os.read(reading, 20))
            if {how == "deadline"}:
                time.sleep(600)
            return 1.0
        """
    )
    async with rewarding(function=f"{name}:reward", deadline_s=1.0) as reward:
        if how == "deadline":
            with pytest.raises(RewardError, match="took longer"):
                await reward.score(batch(["a"]))
        else:
            assert await scores(reward, batch(["a"])) == [1.0]
    assert await gone(int((tmp_path / "pid").read_text()))


FORGED = [
    b'{"value": 99.0}',
    b'{"value": 99.0, "to": ""}',
    b'{"ready": true}',
    b'{"error": 7}',
    b'{"value": "1"}',
    b'{"value": {"score": null}}',
    b"[]",
    b"null",
    b"not json",
    b"[" * 100_000,
    b"\xff\xfe",
    b"",
]


@pytest.mark.parametrize("forged", [*FORGED, None], ids=range(len(FORGED) + 1))
async def test_what_a_function_writes_to_its_socket_is_no_reward(module: Module, forged: bytes | None) -> None:
    frame = b"\xff\xff\xff\xff" if forged is None else len(forged).to_bytes(4, "big") + forged
    name = module(
        f"""
        import os, stat, time
        def reward(token_ids):
            if token_ids[0] == ord("x"):
                for handle in map(int, os.listdir("/proc/self/fd")):
                    try:
                        if stat.S_ISSOCK(os.fstat(handle).st_mode):
                            os.write(handle, {frame!r})
                    except OSError:
                        pass
            return 1.0
        """
    )
    async with rewarding(function=f"{name}:reward", deadline_s=5.0) as reward:
        with pytest.raises(RewardError, match="wrote to the socket of its replies"):
            await reward.score(batch(["x"]))
        assert await scores(reward, batch(["a", "b"])) == [1.0, 1.0]


async def test_a_call_fails_when_its_third_process_is_killed(module: Module, tmp_path: Path) -> None:
    fifo, armed = tmp_path / "started", tmp_path / "armed"
    armed.touch()
    name = module(one_that_waits_to_be_killed(fifo, armed))
    async with listening(fifo) as started, rewarding(function=f"{name}:reward", deadline_s=500) as reward:
        scoring = asyncio.ensure_future(reward.score(batch(["a"])))
        for _ in range(3):
            os.kill(int(await started.readline()), signal.SIGKILL)
        with pytest.raises(
            RewardError, match=r"by SIGKILL: 3 processes died .* \(by SIGKILL, by SIGKILL, by SIGKILL\)"
        ) as caught:
            await scoring
        assert caught.value.how == "died"
        armed.unlink()
        assert await scores(reward, batch(["a"])) == [2.0]


@pytest.mark.parametrize(
    ("body", "times"), [("os.kill(os.getpid(), 11)", 3), ("os._exit(7)", 1)], ids=["segfault", "exit"]
)
async def test_a_function_that_ends_its_process_is_not_retried_forever(
    module: Module, tmp_path: Path, body: str, times: int
) -> None:
    asked = tmp_path / "asked"
    name = module(
        f"""
        import os
        def reward(token_ids):
            with open({str(asked)!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            {body}
        """
    )
    async with rewarding(function=f"{name}:reward") as reward:
        with pytest.raises(RewardError, match="its process ended"):
            await reward.score(batch(["a"]))
    pids = asked.read_text().split()
    assert len(pids) == len(set(pids)) == times


async def test_a_process_that_is_killed_while_it_imports_is_replaced(module: Module, tmp_path: Path) -> None:
    fifo, armed = tmp_path / "started", tmp_path / "armed"
    name = module(
        f"""
        import os, pathlib, time
        if pathlib.Path({str(armed)!r}).exists():
            with open({str(fifo)!r}, "w") as file:
                file.write(f"{{os.getpid()}}\\n")
            time.sleep(600)
        def reward(token_ids):
            return 2.0
        """
    )
    async with listening(fifo) as started, rewarding(function=f"{name}:reward") as reward:
        armed.touch()
        scoring = asyncio.ensure_future(scores(reward, batch(["a"])))
        pid = int(await started.readline())
        armed.unlink()
        os.kill(pid, signal.SIGKILL)
        assert await scoring == [2.0]


async def test_a_child_that_outlives_a_killed_process_does_not_hide_its_death(module: Module, tmp_path: Path) -> None:
    fifo, armed = tmp_path / "started", tmp_path / "armed"
    armed.touch()
    name = module(
        f"""
        import os, pathlib, time
        def reward(token_ids):
            if not pathlib.Path({str(armed)!r}).exists():
                return 2.0
            if not (child := os.fork()):
                time.sleep(600)
            with open({str(fifo)!r}, "w") as file:
                file.write(f"{{os.getpid()}} {{child}}\\n")
            time.sleep(600)
        """
    )
    async with listening(fifo) as started, rewarding(function=f"{name}:reward", deadline_s=500) as reward:
        scoring = asyncio.ensure_future(scores(reward, batch(["a"])))
        pid, child = map(int, (await started.readline()).split())
        armed.unlink()
        os.kill(pid, signal.SIGKILL)
        assert await scoring == [2.0]
        assert await gone(child)


async def test_closing_leaves_no_process_that_was_just_being_started(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module("def reward(token_ids): return 1.0")
    opening, closed = asyncio.Event(), threading.Event()
    loop, start = asyncio.get_running_loop(), ScoringProcess._open
    started: list[int] = []

    def slow_start(owner: ScoringProcess, descriptor: int) -> subprocess.Popen[bytes]:
        loop.call_soon_threadsafe(opening.set)
        closed.wait(60)
        process = start(owner, descriptor)
        started.append(process.pid)
        return process

    monkeypatch.setattr(ScoringProcess, "_open", slow_start)
    reward = FunctionReward(function=f"{name}:reward")
    scoring = asyncio.ensure_future(reward.score(batch(["a"])))
    await opening.wait()
    await reward.close()
    closed.set()
    with pytest.raises(RewardError, match="was closed"):
        await scoring
    assert len(started) == 1
    assert not alive(started[0])


@linux
@pytest.mark.parametrize("stopped", ["nothing", "the process", "its keeper"])
async def test_a_parent_that_is_killed_leaves_no_process(module: Module, tmp_path: Path, stopped: str) -> None:
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    name = module(
        f"""
        import os, time
        def reward(task):
            with open({str(fifo)!r}, "w") as file:
                file.write(f"{{os.getpid()}} {{os.getppid()}}")
            time.sleep(600)
        """
    )
    program = dedent(
        f"""
        import asyncio, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from asyncrl.rewards.scoring import ScoringProcess
        asyncio.run(ScoringProcess("{name}:reward", start_deadline_s=60).call({{"task": 1}}, deadline_s=600))
        """
    )
    parent = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", program])
    try:
        process, keeper = map(int, (await asyncio.to_thread(fifo.read_text)).split())
        assert alive(process)
        if stopped != "nothing":
            os.kill(process if stopped == "the process" else keeper, signal.SIGSTOP)
    finally:
        parent.send_signal(signal.SIGKILL)
        await asyncio.to_thread(parent.wait)
    assert await gone(process)
    assert await gone(keeper)


async def test_an_async_function_runs_on_the_loop_so_many_at_a_time(module: Module) -> None:
    name = module(
        """
        import asyncio, os
        running = most = 0
        async def reward(token_ids):
            global running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return os.getpid()
        """
    )
    import importlib

    async with rewarding(function=f"{name}:reward", concurrency=3) as reward:
        assert await scores(reward, batch(list("abcdefgh"))) == [float(os.getpid())] * 8
    assert importlib.import_module(name).most == 3


async def test_an_async_function_is_cancelled_at_its_deadline(module: Module) -> None:
    name = module(
        """
        import asyncio
        ended = False
        async def reward(token_ids):
            global ended
            try:
                await asyncio.Event().wait()
            finally:
                ended = True
        async def times_out_itself(token_ids):
            raise TimeoutError("the judge was slow")
        """
    )
    import importlib

    async with rewarding(function=f"{name}:reward", deadline_s=0.05) as reward:
        with pytest.raises(RewardError, match=r"row 0 .*took longer than its deadline of 0\.05 s"):
            await reward.score(batch(["a"]))
    assert importlib.import_module(name).ended
    async with rewarding(function=f"{name}:times_out_itself") as reward:
        with pytest.raises(RewardError, match=r"(?s)raised.*the judge was slow"):
            await reward.score(batch(["a"]))


async def test_a_function_of_this_process_runs_in_threads_of_its_own_so_many_at_a_time() -> None:
    begun, may_end = threading.Barrier(41), threading.Event()

    def hang_or_answer(hang: bool) -> float:
        if hang:
            begun.wait(10)
            may_end.wait()
        return 1.0

    function = UserFunction(hang_or_answer, deadline_s=60, concurrency=40)
    calls = [asyncio.ensure_future(function.call({"hang": True})) for _ in range(40)]
    await in_own_thread(begun.wait, 10)  # more than the event loop's threads
    for each in calls:
        each.cancel()
    await asyncio.wait(calls)
    try:
        assert await function.call({"hang": False}) == 1.0
    finally:
        may_end.set()
        await function.close()


async def test_a_required_column_that_is_missing_is_named(module: Module) -> None:
    name = module("def reward(ground_truth, token_ids): return 1.0")
    async with rewarding(function=f"{name}:reward") as reward:
        with pytest.raises(SchemaError, match=r"requires ground_truth, which the batch lacks: .* are task"):
            await reward.score(batch(["a"]))


async def test_no_rows_need_no_process(module: Module) -> None:
    name = module("def reward(task): return 1.0")
    async with rewarding(function=f"{name}:reward") as reward:
        assert await scores(reward, batch(["a"]).select_idxs([])) == []


async def test_a_module_that_fails_to_import_in_the_process_raises(module: Module) -> None:
    name = module(
        """
        import sys
        if "pytest" not in sys.modules:
            raise ImportError("only in tests")
        def reward(task): return 1.0
        """
    )
    async with rewarding(function=f"{name}:reward") as reward:
        with pytest.raises(RewardError, match=r"(?s)its module could not be imported.*only in tests"):
            await reward.score(batch(["a"]))


def test_wrong_arguments_are_refused_at_once(module: Module) -> None:
    name = module(
        """
        number = 3
        def texts(completion): return 1.0
        def positional(task, /): return 1.0
        def good(task): return 1.0
        """
    )
    for options, message in [
        ({"function": "rewards.reward"}, "cannot be imported by another process"),
        ({"function": "__main__:reward"}, "cannot be imported by another process"),
        ({"function": "no_such_module_here:reward"}, "no_such_module_here"),
        ({"function": f"{name}:god"}, "did you mean good"),
        ({"function": f"{name}:number"}, "is a int, not a function"),
        ({"function": f"{name}:texts"}, "takes the text 'completion'"),
        ({"function": f"{name}:positional"}, "positional-only"),
        ({"function": f"{name}:good", "processes": 0}, "processes is 0"),
        ({"function": f"{name}:good", "deadline_s": 0}, "deadline_s is 0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            FunctionReward(**options)  # type: ignore[arg-type]
