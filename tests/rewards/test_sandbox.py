"""Foreign programs: held apart, limited, and gone at their deadline."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
from pathlib import Path

import pytest

from asyncrl.rewards.sandbox import ProgramEnd, SandboxLimits, run_program

QUICK = SandboxLimits(deadline_s=3.0)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes lie where no other run of these tests makes any."""
    (tmp_path / "sandboxes").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "sandboxes"))


async def run(program: str, *, stdin: str = "", limits: SandboxLimits = QUICK, name: str = "main.py") -> ProgramEnd:
    return await run_program({name: program}, name, stdin=stdin, limits=limits)


async def isolated(*kinds: str) -> None:
    """Skip where the system does not allow it; a sandbox without it still limits and kills."""
    end = await run("")
    missing = [kind for kind in kinds if not getattr(end.isolation, kind)]
    if missing:
        pytest.skip(f"this system does not allow a program its own {', '.join(missing)}")


def left_behind() -> list[str]:
    return [path.name for path in Path(tempfile.gettempdir()).glob("asyncrl.sandbox.*")]


async def test_a_program_reads_and_writes():
    before = left_behind()
    end = await run("import sys; print(input()[::-1]); print('ill', file=sys.stderr); sys.exit(3)", stdin="abc\n")
    assert (end.how, end.code, end.stdout, end.stderr) == ("exited", 3, "cba\n", "ill\n")
    assert left_behind() == before


async def test_it_sees_none_of_our_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    end = await run("import os; print(sorted(os.environ), os.getcwd() == os.environ['HOME'])")
    assert "OPENAI_API_KEY" not in end.stdout
    assert end.stdout.endswith("True\n")


@pytest.mark.slow
async def test_it_is_gone_at_its_deadline_with_what_it_started(tmp_path: Path):
    await isolated("processes")
    program = """
import os, time
if os.fork() == 0:
    os.setsid()    # out of the group: only a process tree of its own catches these
    os.fork()
    time.sleep(3600)
print("begun", flush=True)
time.sleep(3600)
"""
    name = f"program{secrets.token_hex(8)}.py"
    end = await run(program, limits=SandboxLimits(deadline_s=0.5), name=name)
    assert (end.how, end.stdout) == ("deadline", "begun\n")
    assert _running(name) == []


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("program", "limits", "how"),
    [
        ("while True: pass", SandboxLimits(deadline_s=0.1), "deadline"),
        ("while True: print('x' * 1000)", SandboxLimits(deadline_s=3, output_bytes=10_000), "output"),
        ("import os; os.kill(os.getpid(), 11)", QUICK, "killed"),
    ],
)
async def test_how_it_ended_is_told_at_once(program: str, limits: SandboxLimits, how: str):
    async with asyncio.timeout(8):  # far from what it waits for a sandbox that does not answer
        assert (await run(program, limits=limits)).how == how


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["outside", "first", "program"])
async def test_one_that_somebody_kills_is_run_again(victim: int):
    await isolated("processes")
    name = f"program{secrets.token_hex(8)}.py"
    call = asyncio.create_task(run("print('begun'); import time; time.sleep(0.7); print('done')", name=name))
    async with asyncio.timeout(10):
        while len(tree := _running(name)) < 3 or b"sandbox_program" in _command(tree[2]):
            await asyncio.sleep(0.01)
    os.kill(int(tree[victim].name), signal.SIGKILL)
    end = await call
    assert (end.how, end.stdout) == ("exited", "begun\ndone\n")
    assert _running(name) == []


async def test_one_that_dies_again_and_again_kills_itself(caplog: pytest.LogCaptureFixture):
    end = await run("import os; os.kill(os.getpid(), 9)")
    assert (end.how, end.code) == ("killed", 9)
    assert [record.message.endswith(f"(death {n + 1})") for n, record in enumerate(caplog.records)] == [True] * 3


def _running(name: str) -> list[Path]:
    """Living processes of the program ``name``, oldest first."""
    processes = [path for path in Path("/proc").iterdir() if path.name.isdigit() and name.encode() in _command(path)]
    return sorted(processes, key=lambda path: int(path.name))


@pytest.mark.slow
async def test_memory_and_files_have_an_end():
    limits = SandboxLimits(deadline_s=3, memory_bytes=256 << 20, file_bytes=1 << 20)
    end = await run("try:\n    x = bytearray(1 << 30)\nexcept MemoryError:\n    print('no more')", limits=limits)
    assert end.stdout == "no more\n"
    end = await run(
        "try:\n    open('x', 'wb').write(bytes(1 << 22))\nexcept OSError:\n    print('full')", limits=limits
    )
    assert end.how == "killed" or end.stdout == "full\n"


async def test_there_is_no_network():
    await isolated("network")
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        end = await run(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)")
    assert end.code == 1
    assert "unreachable" in end.stderr or "refused" in end.stderr


async def test_files_of_this_machine_can_be_read_but_not_changed(tmp_path: Path):
    await isolated("files")
    (tmp_path / "ours").write_text("whole")
    path = str(tmp_path / "ours")
    program = f"print(open({path!r}).read()); open('mine', 'w').write('x'); open({path!r}, 'w')"
    end = await run(program)
    assert end.stdout == "whole\n"
    assert "Read-only file system" in end.stderr
    assert (tmp_path / "ours").read_text() == "whole"


async def test_a_call_that_is_cancelled_leaves_nothing():
    before = left_behind()
    call = asyncio.create_task(run("import time; time.sleep(3600)", limits=SandboxLimits(deadline_s=60)))
    await asyncio.sleep(0.2)  # into the program, or on the way there: either is fine
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert left_behind() == before
