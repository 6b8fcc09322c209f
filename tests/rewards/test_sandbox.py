"""The sandbox: isolation, limits and deadlines of untrusted programs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from asyncrl.rewards import sandbox
from asyncrl.rewards.sandbox import ProgramEnd, SandboxLimits, run_program
from tests.rewards.escapes import ESCAPES

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


async def test_a_program_sees_no_environment_variable_of_this_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    end = await run("import os; print(sorted(os.environ), os.getcwd() == os.environ['HOME'])")
    assert "OPENAI_API_KEY" not in end.stdout
    assert end.stdout.endswith("True\n")


@pytest.mark.slow
async def test_the_deadline_kills_a_program_with_its_children(tmp_path: Path):
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
async def test_a_limit_ends_the_call_at_once(program: str, limits: SandboxLimits, how: str):
    async with asyncio.timeout(8):  # far from what it waits for a sandbox that does not answer
        assert (await run(program, limits=limits)).how == how


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["outside", "first", "program"])
async def test_a_program_killed_from_outside_runs_again(victim: int):
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


async def test_the_third_death_by_sigkill_counts_as_the_programs_own(caplog: pytest.LogCaptureFixture):
    end = await run("import os; os.kill(os.getpid(), 9)")
    assert (end.how, end.code) == ("killed", 9)
    assert [record.message.endswith(f"(death {n + 1})") for n, record in enumerate(caplog.records)] == [True] * 3


def _running(name: str) -> list[Path]:
    """Living processes of the program ``name``, oldest first."""
    processes = [path for path in Path("/proc").iterdir() if path.name.isdigit() and name.encode() in _command(path)]
    return sorted(processes, key=lambda path: int(path.name))


@pytest.mark.slow
async def test_memory_and_files_are_limited():
    limits = SandboxLimits(deadline_s=3, memory_bytes=256 << 20, file_bytes=1 << 20)
    end = await run("try:\n    x = bytearray(1 << 30)\nexcept MemoryError:\n    print('no more')", limits=limits)
    assert end.stdout == "no more\n"
    end = await run(
        "try:\n    open('x', 'wb').write(bytes(1 << 22))\nexcept OSError:\n    print('full')", limits=limits
    )
    assert end.how == "killed" or end.stdout == "full\n"


async def test_a_program_has_no_network():
    await isolated("network")
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        end = await run(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)")
    assert end.code == 1
    assert "unreachable" in end.stderr or "refused" in end.stderr


async def test_no_program_leaves_the_sandbox(tmp_path: Path):
    await isolated("user", "network", "processes", "files", "system_calls")
    ours, path, abstract = tmp_path / "ours", str(tmp_path / "s"), f"asyncrl-{secrets.token_hex(8)}"
    ours.write_text("whole")
    (tmp_path / ".profile").touch()
    few = asyncio.Semaphore(3)

    async def tried(name: str, port: int) -> ProgramEnd:
        values = {"file": ours, "socket": path, "abstract": abstract, "pid": os.getpid(), "home": tmp_path}
        program = ESCAPES[name].format(**values, port=port)
        async with few, asyncio.timeout(8):
            return await run(program, limits=SandboxLimits(deadline_s=3.0))

    async with AsyncExitStack() as servers:
        for address in (path, f"\0{abstract}"):
            await servers.enter_async_context(await asyncio.start_unix_server(lambda reader, writer: None, address))
        tcp = await servers.enter_async_context(await asyncio.start_server(lambda *_: None, "127.0.0.1", 0))
        port = tcp.sockets[0].getsockname()[1]
        ends = dict(zip(ESCAPES, await asyncio.gather(*(tried(name, port) for name in ESCAPES)), strict=True))
    assert [name for name, end in ends.items() if "ESCAPED" in end.stdout] == []
    assert ours.read_text() == "whole"
    # A trial that failed for a mistake of its own would show nothing.
    mistakes = re.compile("NameError|SyntaxError|TypeError|AttributeError")
    assert [(name, end.stderr) for name, end in ends.items() if mistakes.search(end.stderr)] == []


@pytest.mark.slow
def test_no_program_leaves_the_sandbox_of_an_ordinary_user():
    if os.getuid() != 0 or not Path("/usr/bin/python3").exists() or not shutil.which("setpriv"):
        pytest.skip("needs root, the system's Python and setpriv")
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        shutil.copy(Path(sandbox.__file__).with_name("sandbox_program.py"), folder / "sandbox_program.py")
        (folder / "ours").write_text("whole")
        (folder / ".profile").touch()
        (folder / "work").mkdir()
        folder.chmod(0o755)
        os.chown(folder / "work", 1000, 1000)
        values = {"file": folder / "ours", "socket": "/s", "abstract": "none", "port": 1, "pid": os.getpid()}
        values["home"] = folder
        spec = {"cpu_s": 3, "memory_bytes": 1 << 30, "file_bytes": 16 << 20, "files": 64, "children": 32}
        spec |= {"folder": str(folder / "work"), "visible": ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache"]}
        left = []
        for name in sorted(set(ESCAPES) - {"a fork bomb", "memory of many processes"}):
            (folder / "work" / "main.py").write_text(ESCAPES[name].format(**values))
            reading, writing = os.pipe()
            command = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "/usr/bin/python3", "-I", "-S"]
            command += [str(folder / "sandbox_program.py"), json.dumps({**spec, "report": writing})]
            command += ["--", "/usr/bin/python3", "-I", "main.py"]
            end = subprocess.run(command, pass_fds=[writing], capture_output=True, text=True, timeout=20, check=False)
            os.close(writing)
            with open(reading, "rb") as report:  # noqa: PTH123  a pipe
                assert all(json.load(report).values())
            left += [name] if "ESCAPED" in end.stdout else []
        assert left == []
    finally:
        shutil.rmtree(folder)


async def test_what_a_program_of_a_test_needs_is_there():
    program = """
import collections, ctypes, json, math, multiprocessing, os, queue, random, socket, sqlite3, subprocess, tempfile
import threading, time, numpy
open("mine", "w").write("x")
with tempfile.NamedTemporaryFile("w") as file:
    file.write("y")
assert subprocess.run(["/bin/sh", "-c", "echo $((6 * 7))"], capture_output=True, text=True).stdout == "42\\n"
a, b = socket.socketpair()
a.send(b"z")
assert b.recv(1) == b"z"
with multiprocessing.Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
assert os.path.exists("/proc/self/status") and random.SystemRandom().random() < 1
print(os.getcwd() == os.environ["HOME"], time.localtime().tm_year > 2000)
"""
    end = await run(program, limits=SandboxLimits(deadline_s=8.0))
    assert (end.stdout, end.stderr) == ("True True\n", "")


async def test_a_cancelled_call_leaves_no_folder():
    before = left_behind()
    call = asyncio.create_task(run("import time; time.sleep(3600)", limits=SandboxLimits(deadline_s=60)))
    await asyncio.sleep(0.2)  # into the program, or on the way there: either is fine
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert left_behind() == before
