"""Sandboxes in namespaces: isolation, limits, deadlines, resets, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.sandboxes import namespaces
from asyncrl.sandboxes.contract import Isolation, ProgramEnd, SandboxLimits
from asyncrl.sandboxes.namespaces import NamespacesBackend, NamespacesSandbox
from tests.sandboxes.escapes import ESCAPES, STOPS_WHAT_KILLS

QUICK = SandboxLimits(deadline_s=3.0)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes lie where no other run of these tests makes any."""
    (tmp_path / "sandboxes").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "sandboxes"))


@asynccontextmanager
async def made(limits: SandboxLimits = QUICK) -> AsyncIterator[NamespacesSandbox]:
    sandbox = await NamespacesBackend().create(limits)
    try:
        yield sandbox
    finally:
        await sandbox.destroy()


async def run(program: str, *, stdin: str = "", limits: SandboxLimits = QUICK, name: str = "main.py") -> ProgramEnd:
    async with made(limits) as sandbox:
        await sandbox.write(name, program.encode())
        return await sandbox.exec([sys.executable, "-I", name], stdin=stdin.encode())


async def isolated(*kinds: str) -> None:
    """Skip where the system does not allow it; a sandbox without it still limits and kills."""
    async with made() as sandbox:
        missing = [kind for kind in kinds if not getattr(sandbox.isolation, kind)]
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


@pytest.mark.parametrize("victim", [0, 1], ids=["outside", "first"])
async def test_a_sandbox_that_is_killed_is_a_failure_and_leaves_nothing(victim: int):
    await isolated("processes")
    name = f"program{secrets.token_hex(8)}.py"
    call = asyncio.create_task(run("print('begun'); import time; time.sleep(60)", name=name))
    tree = await begun(name)
    os.kill(tree[victim], signal.SIGKILL)
    with pytest.raises(SandboxError, match="died"):
        await call
    assert _running(name) == [] == left_behind()


async def test_a_program_that_is_killed_is_a_result():
    end = await run("import os; os.kill(os.getpid(), 9)")
    assert (end.how, end.code) == ("killed", 9)


async def begun(name: str) -> list[int]:
    """Wait until a program runs; return the ids of the sandbox's process, the first of its tree, and the program."""
    async with asyncio.timeout(10):  # what writes the program has its name, too, and ends before it begins
        while not (running := [each for each in _running(name) if b"python" in _command(each)]):
            await asyncio.sleep(0.01)
    outside = int((running[0] / "stat").read_text().rpartition(")")[2].split()[1])
    children = Path(f"/proc/{outside}/task/{outside}/children").read_text().split()
    return [outside, int(children[0]), int(running[0].name)]


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


async def test_the_time_of_the_processor_allows_a_program_all_cores_until_its_deadline():
    end = await run("import resource; print(*resource.getrlimit(resource.RLIMIT_CPU))")
    soft, hard = map(int, end.stdout.split())
    assert soft >= QUICK.deadline_s * (os.cpu_count() or 1)
    assert hard > soft  # it gets SIGXCPU, which does not come from outside


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
    free: asyncio.Queue[NamespacesSandbox] = asyncio.Queue()

    async def tried(name: str, port: int) -> ProgramEnd:
        values = {"file": ours, "socket": path, "abstract": abstract, "pid": os.getpid(), "home": tmp_path}
        sandbox = await free.get()
        async with asyncio.timeout(8):
            end = await sandbox.exec([sys.executable, "-I", "-c", ESCAPES[name].format(**values, port=port)])
            assert await sandbox.reset(), name
        free.put_nowait(sandbox)
        return end

    async with AsyncExitStack() as servers:
        for _ in range(3):
            free.put_nowait(await servers.enter_async_context(made()))
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
        shutil.copy(Path(namespaces.__file__).with_name("namespaces_program.py"), folder / "program.py")
        (folder / "ours").write_text("whole")
        (folder / ".profile").touch()
        (folder / "work").mkdir()
        folder.chmod(0o755)
        os.chown(folder / "work", 1000, 1000)
        values = {"file": folder / "ours", "socket": "/s", "abstract": "none", "port": 1, "pid": os.getpid()}
        values["home"] = folder
        spec = {"memory_bytes": 1 << 30, "file_bytes": 16 << 20, "files": 64, "children": 32, "loopback": False}
        spec |= {"folder": str(folder / "work"), "visible": ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache"]}
        left = []
        programs = {**ESCAPES, "stop what kills": STOPS_WHAT_KILLS}
        for name in sorted(set(programs) - {"a fork bomb", "memory of many processes"}):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "/usr/bin/python3", "-I", "-S"]
            command += [str(folder / "program.py"), json.dumps(spec), str(theirs.fileno())]
            with subprocess.Popen(command, pass_fds=[theirs.fileno()]), ours, tempfile.TemporaryFile() as output:
                theirs.close()
                assert all(json.loads(ours.recv(1 << 16))["isolation"].values())
                program = ["/usr/bin/python3", "-I", "-c", programs[name].format(**values)]
                order = {"do": "exec", "command": program, "env": {"PATH": os.defpath}, "cpu_s": 3}
                nothing = os.open("/dev/null", os.O_RDWR)
                socket.send_fds(ours, [json.dumps(order).encode()], [nothing, output.fileno(), nothing])
                os.close(nothing)
                ours.settimeout(20)
                assert "code" in json.loads(ours.recv(1 << 16)), name
                output.seek(0)
                left += [name] if b"ESCAPED" in output.read() else []
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
print(os.getcwd() == os.environ["HOME"] == "/sandbox", time.localtime().tm_year > 2000)
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


async def test_files_live_over_several_commands_and_travel_in_a_snapshot():
    async with made() as first, made() as second:
        await first.write("a/-b c", b"\0\xff" * 9)
        assert (await first.exec(["/bin/sh", "-c", "wc -c < 'a/-b c'"])).stdout == "18\n"
        await second.restore(await first.snapshot())
        assert await second.read("a/-b c") == b"\0\xff" * 9
        with pytest.raises(OSError, match="nothing"):
            await second.read("nothing")
        with pytest.raises(OSError, match="No space"):
            await second.write("large", bytes(QUICK.file_bytes + 1))


async def test_nothing_that_a_command_started_outlives_it_and_a_reset_leaves_no_file():
    await isolated("processes", "files")
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n"
    async with made() as sandbox:
        await sandbox.exec([sys.executable, "-c", daemon + "open('left', 'w').write('x')"])
        processes = "import os; print([p for p in os.listdir('/proc') if p.isdigit()])"
        assert (await sandbox.exec([sys.executable, "-c", processes])).stdout.count("'") == 4  # the first, and itself
        await sandbox.exec(["chmod", "0", "."])
        assert (await sandbox.exec(["ls"])).code != 0
        assert await sandbox.reset()
        assert (await sandbox.exec(["ls", "-A"])).output == b""


async def test_the_memory_of_all_processes_together_is_limited():
    await isolated("processes")
    program = "import os, time\nfor n in range(4):\n    if os.fork() == 0: b = bytearray(64 << 20); time.sleep(60)\n"
    end = await run(program + "time.sleep(60)", limits=SandboxLimits(deadline_s=8.0, memory_bytes=150 << 20))
    assert end.how == "memory"


async def test_a_destroyed_sandbox_ends_its_command_by_name():
    async with made() as sandbox:
        call = asyncio.create_task(sandbox.exec(["sleep", "60"], deadline_s=60.0))
        await asyncio.sleep(0)
        await sandbox.destroy()
        with pytest.raises(SandboxError):
            await call
        with pytest.raises(SandboxError, match="gone"):
            await sandbox.exec(["true"])


async def test_what_cannot_be_kept_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="no network"):
        await NamespacesBackend().create(SandboxLimits(network=True))
    with pytest.raises(ConfigError, match="deadline_s is 0"):
        SandboxLimits(deadline_s=0)
    monkeypatch.setattr(Isolation, "missing", ["user", "network"])
    with pytest.raises(SandboxError, match="does not allow programs an own user, network"):
        await NamespacesBackend(require_isolation=True).create(QUICK)
    assert left_behind() == []
