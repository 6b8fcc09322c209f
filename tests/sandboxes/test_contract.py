"""What every backend of sandboxes does: the same tests for namespaces, containers (their command line) and a server."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import stat
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.sandboxes.container import ContainerBackend
from asyncrl.sandboxes.contract import Sandbox, SandboxBackend, SandboxLimits
from asyncrl.sandboxes.namespaces import NamespacesBackend, NamespacesSandbox
from asyncrl.sandboxes.remote import RemoteBackend, RemoteSandbox
from asyncrl.serve.middleware import KeyRing
from asyncrl.serve.sandboxes import SandboxServer

KEY = "k" * 32
LIMITS = SandboxLimits(deadline_s=5.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What sandboxes leave behind is here."""
    (tmp_path / "left").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "left"))
    return tmp_path / "left"


def docker_in(folder: Path) -> str:
    program = folder.parent / "docker"
    script = Path(__file__).with_name("docker.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {script} {folder} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch, *, most: int = 4, lease_s: float = 60.0) -> AsyncIterator[str]:
    server = SandboxServer(NamespacesBackend(), LIMITS, keys=KeyRing({"client": KEY}), most=most, lease_s=lease_s)
    monkeypatch.setenv("ASYNCRL_SANDBOX_KEY", KEY)
    async with server.serving() as url:
        yield url


@asynccontextmanager
async def made(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SandboxBackend]:
    backend: SandboxBackend
    if kind == "remote":
        async with served(monkeypatch) as url:
            backend = RemoteBackend(url=url)
            yield backend
            await backend.close()
        return
    backend = NamespacesBackend() if kind == "namespaces" else ContainerBackend(image="x", command=docker_in(folder))
    yield backend
    await backend.close()


@pytest.mark.parametrize("kind", ["namespaces", "container", "remote"])
async def test_a_sandbox_of_every_kind(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET", "x")
    async with made(kind, folder, monkeypatch) as backend:
        sandbox = await backend.create(LIMITS)
        end = await sandbox.exec(
            ["/bin/sh", "-c", "cat; echo ill $A$SECRET >&2; exit 3"], stdin=b"\0\xff", env={"A": "b"}
        )
        assert (end.how, end.code, end.output, end.stderr, end.succeeded) == ("exited", 3, b"\0\xff", "ill b\n", False)
        assert (await sandbox.exec(["/bin/sh", "-c", "kill -11 $$"])).how == "killed"
        end = await sandbox.exec(["/bin/sh", "-c", "exit 255"])
        assert (end.how, end.code) == ("exited", 255)
        assert (await sandbox.exec(["nothing here"])).code != 0
        for unstartable in (["echo", "x" * 100_000], ["echo", "\0"]):
            end = await sandbox.exec(unstartable)
            assert (end.how, end.code, end.output) == ("exited", 126, b"")
        with pytest.raises(OSError, match="null byte"):
            await sandbox.write("a\0b", b"1")
        assert (await sandbox.exec(["echo", "x" * 90_000])).succeeded
        end = await sandbox.exec(["/bin/sh", "-c", "while :; do echo x; done"], output_bytes=10)
        assert (end.how, end.output) == ("output", b"x\n" * 5)
        end = await sandbox.exec(["sleep", "60"], deadline_s=0.2)
        assert (end.how, end.output) == ("deadline", b"")
        await sandbox.write("a/b", b"1")
        assert await sandbox.read("a/b") == b"1"
        other = await backend.create(LIMITS)
        await other.restore(await sandbox.snapshot())
        assert await other.read("a/b") == b"1"
        if await sandbox.reset():
            assert (await sandbox.exec(["ls"])).output == b""
        else:
            assert kind == "container"
        await asyncio.gather(sandbox.destroy(), sandbox.destroy(), other.destroy())
        with pytest.raises(SandboxError, match="gone"):
            await sandbox.exec(["true"])
    assert [each.name for each in folder.iterdir() if each.name != "log"] == []


@pytest.mark.parametrize("kind", ["namespaces", "container", "remote"])
async def test_a_file_is_written_through_no_link(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    async with made(kind, folder, monkeypatch) as backend:
        sandbox = await backend.create(LIMITS)
        links = "echo own > out; ln -s out soft; ln out hard; ln -s /dev/null null; mkdir a; ln -s ../a a/b; ln -s . c"
        assert (await sandbox.exec(["/bin/sh", "-c", links])).succeeded
        for path in ("soft", "hard", "null", "./a/../-d//e"):
            await sandbox.write(path, b"new")
            assert await sandbox.read(path) == b"new"
        assert await sandbox.read("out") == b"own\n"
        await sandbox.write("run", b"exit 1")
        assert (await sandbox.exec(["/bin/sh", "-c", "chmod +x run"])).succeeded
        await sandbox.write("run", b"#!/bin/sh\nexit 0")
        assert (await sandbox.exec(["./run"])).succeeded
        for path in ("c/x", "c/d/x", "a/b/x"):
            with pytest.raises(OSError, match="a link leads to"):
                await sandbox.write(path, b"new")
        with pytest.raises(OSError, match=r"a: .*directory"):
            await sandbox.write("a", b"new")


@pytest.mark.parametrize("kind", ["namespaces", "container", "remote"])
async def test_a_file_that_is_not_written_in_time_is_a_failure_of_the_sandbox(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    async with made(kind, folder, monkeypatch) as backend:
        sandbox = await backend.create(LIMITS)
        assert (await sandbox.exec(["mkfifo", "pipe"])).succeeded
        with pytest.raises(OSError, match="pipe"):  # a program's doing
            await sandbox.read("pipe")
        sandbox.limits = replace(LIMITS, deadline_s=1e-6)
        with pytest.raises(SandboxError, match=r"a: a sandbox ended it \(deadline\)"):
            await sandbox.write("a", b"1")
        with pytest.raises(SandboxError, match="gone"):
            await sandbox.exec(["true"])


async def test_a_container_has_what_the_limits_say_and_no_more(folder: Path):
    limits = SandboxLimits(memory_bytes=1 << 28, children=5, files=9, file_bytes=1 << 20)
    backend = ContainerBackend(
        image="python:3.12", command=docker_in(folder), options=["--runtime", "runsc"], lease_s=60
    )
    await backend.create(limits)
    await backend.create(SandboxLimits(network=True))
    await backend.close()
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    run, other = (line for line in lines if line[0] == "run")
    text = " ".join(run)
    for option in (
        "--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--user 65534:65534",
        "--memory 268435456 --memory-swap 268435456", "--pids-limit 7", "--ulimit nofile=9:9", "fsize=1048576",
        "--tmpfs /sandbox:rw,exec,nosuid,nodev,size=1048576", "--runtime runsc --entrypoint /bin/sh python:3.12 -c",
    ):  # fmt: skip
        assert option in text
    assert run[-1] == "60"
    assert "--network bridge" in " ".join(other)


async def test_a_command_keeps_its_end_if_what_it_leaves_cannot_be_killed(folder: Path):
    backend = ContainerBackend(image="x", command=docker_in(folder))
    sandbox = await backend.create(LIMITS)
    end = await sandbox.exec(["/bin/sh", "-c", "touch no-room; exit 3"])
    assert (end.how, end.code) == ("exited", 3)
    with pytest.raises(SandboxError, match="gone"):
        await sandbox.exec(["true"])
    dead = await backend.create(LIMITS)
    with pytest.raises(SandboxError, match="no such container"):
        await dead.exec(["rm", "-r", f"../{dead.container}"])
    await backend.close()


async def test_containers_of_a_dead_process_are_removed_and_those_of_others_are_not(folder: Path):
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    owners = {"dead": f"{machine}-{os.getpid()}-1", "elsewhere": f"other-{os.getpid()}-1"}
    for name, owner in owners.items():
        (folder / name).mkdir()
        (folder / f"{name}.owner").write_text(owner)
    backend = ContainerBackend(image="x", command=docker_in(folder))
    sandbox = await backend.create(LIMITS)
    assert {each.name for each in folder.iterdir() if each.is_dir()} == {"elsewhere", sandbox.container}
    await backend.close()


async def test_containers_are_made_although_old_ones_could_not_be_listed_once_or_removed(folder: Path):
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    (folder / "gone.owner").write_text(f"{machine}-{os.getpid()}-1")
    program = Path(docker_in(folder))
    (once := folder.parent / "once").touch()
    lines = program.read_text().splitlines()
    program.write_text("\n".join([lines[0], f'[ "$1" = ps ] && rm {once} 2>/dev/null && exit 1', *lines[1:]]))
    backend = ContainerBackend(image="x", command=str(program))
    with pytest.raises(SandboxError, match=r"ps failed \(1\)"):
        await backend.create(LIMITS)
    await (await backend.create(LIMITS)).destroy()
    await backend.close()


async def test_a_command_line_that_fails_is_a_failure(folder: Path):
    backend = ContainerBackend(image="x", command="false")
    with pytest.raises(SandboxError, match=r"false ps failed \(1\)"):
        await backend.create(LIMITS)
    with pytest.raises(ConfigError, match="no such-program here"):
        ContainerBackend(image="x", command="such-program")


async def test_a_server_refuses_before_any_work(monkeypatch: pytest.MonkeyPatch, folder: Path):
    with pytest.raises(ConfigError, match="ASYNCRL_SANDBOX_KEY is not set"):
        RemoteBackend(url="http://127.0.0.1:1")
    async with served(monkeypatch, most=1) as url:
        backend = RemoteBackend(url=url, wait_s=0.0)
        with pytest.raises(ConfigError, match="memory_bytes is"):
            await backend.create(SandboxLimits(memory_bytes=1 << 40))
        with pytest.raises(ConfigError, match="network is True"):
            await backend.create(SandboxLimits(network=True))
        sandbox = await backend.create(LIMITS)
        monkeypatch.setattr("asyncrl.serve.sandboxes._WAIT_S", 0.01)
        with pytest.raises(SandboxError, match="all 1 sandboxes are leased"):
            await backend.create(LIMITS)
        with pytest.raises(ConfigError, match="may take 5 s"):
            await sandbox.exec(["true"], deadline_s=60.0)
        monkeypatch.setenv("ASYNCRL_SANDBOX_KEY", "z" * 32)
        stranger = RemoteBackend(url=url)
        with pytest.raises(ConfigError, match="key is missing or wrong"):
            await stranger.create(LIMITS)
        await stranger.close()
        await backend.close()
    assert list(folder.iterdir()) == []
    dead = RemoteBackend(url=url)
    with pytest.raises(SandboxError, match="gave no answer"):
        await dead.create(LIMITS)
    await dead.close()


async def test_only_a_body_that_cannot_be_used_is_refused_as_such(monkeypatch: pytest.MonkeyPatch):
    async with served(monkeypatch) as url:
        backend = RemoteBackend(url=url)
        limits = ([], {"disk": 1}, {"files": "9"}, {"network": "x"})
        for body in ({}, *({"limits": each} for each in limits)):
            with pytest.raises(ConfigError, match="the body cannot be used"):
                await backend.ask("POST", "/sandboxes", body, deadline_s=10.0)
        sandbox = await backend.create(LIMITS)
        much = {"command": ["true"], "stdin": "", "env": {}, "deadline_s": 1.0, "output_bytes": 1 << 30}
        with pytest.raises(ConfigError, match="may write 33554432 bytes"):
            await backend.ask("POST", f"{sandbox._path}/exec", much, deadline_s=10.0)

        async def broken(*given: object, **more: object) -> None:
            raise ValueError("of the server's own")

        monkeypatch.setattr(NamespacesSandbox, "exec", broken)
        with pytest.raises(SandboxError, match="gave no answer"):
            await sandbox.exec(["true"])
        await backend.close()


@pytest.mark.parametrize(("status", "answer"), [(401, {}), (200, []), (502, "ill")])
async def test_destroying_a_sandbox_of_a_server_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, status: int, answer: object
):
    async def answers(request: web.Request) -> web.Response:
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answers)
    monkeypatch.setenv("ASYNCRL_SANDBOX_KEY", KEY)
    async with TestServer(app) as server:
        backend = RemoteBackend(url=str(server.make_url("")))
        isolation = dict.fromkeys(("user", "network", "processes", "files", "system_calls"), True)
        sandbox = RemoteSandbox(backend, {"id": "x", "isolation": isolation, "folder": "/"}, LIMITS)
        with pytest.raises((ConfigError, SandboxError), match=r"refused|gave no answer"):
            await sandbox.exec(["true"])
        await RemoteSandbox(backend, {"id": "y", "isolation": isolation, "folder": "/"}, LIMITS).destroy()
        await backend.close()


async def test_an_error_of_the_program_that_serves_is_no_other_port(monkeypatch: pytest.MonkeyPatch):
    async def fails() -> None:
        async with served(monkeypatch) as url:
            other = SandboxServer(NamespacesBackend(), LIMITS, keys=KeyRing({}), most=1, lease_s=1.0)
            with pytest.raises(ConfigError, match="address already in use"):
                await other.serving(port=int(url.rpartition(":")[2])).__aenter__()
            raise OSError("of the program")

    with pytest.raises(OSError, match="of the program"):
        await fails()


@pytest.mark.parametrize("server_waits_s", [0.01, 60.0])
async def test_who_finds_no_sandbox_of_a_server_free_waits(monkeypatch: pytest.MonkeyPatch, server_waits_s: float):
    monkeypatch.setattr("asyncrl.serve.sandboxes._WAIT_S", server_waits_s)
    asked = asyncio.Semaphore(0)
    ask = RemoteBackend.ask

    async def noted(backend: RemoteBackend, *given: Any, **more: Any) -> dict[str, Any]:
        asked.release()
        return await ask(backend, *given, **more)

    async with served(monkeypatch, most=1) as url:
        backend = RemoteBackend(url=url)
        sandbox = await backend.create(LIMITS)
        monkeypatch.setattr(RemoteBackend, "ask", noted)
        waiting = asyncio.create_task(backend.create(LIMITS))
        for _ in range(2 if server_waits_s < 1 else 1):
            await asked.acquire()
        assert not waiting.done()
        await sandbox.destroy()
        await (await waiting).destroy()
        await backend.close()


async def test_a_lease_of_a_server_ends_and_frees_its_place(monkeypatch: pytest.MonkeyPatch, folder: Path):
    async with served(monkeypatch, most=1, lease_s=0.5) as url:
        backend = RemoteBackend(url=url)
        sandbox = await backend.create(LIMITS)
        with pytest.raises(SandboxError):
            await sandbox.exec(["sleep", "4"])
        again: Sandbox | None = None
        async with asyncio.timeout(5):
            while again is None:
                try:
                    again = await backend.create(LIMITS)
                except SandboxError:
                    await asyncio.sleep(0.01)
        await backend.close()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_sandbox_that_is_dead_leaves_its_place(monkeypatch: pytest.MonkeyPatch, how: str):
    begun = asyncio.Event()

    async def exec_(sandbox: NamespacesSandbox, *given: object, **more: object) -> None:
        begun.set()
        if how == "fails":
            raise SandboxError("it is dead")
        await asyncio.Event().wait()

    monkeypatch.setattr(NamespacesSandbox, "exec", exec_)
    body = {"command": ["true"], "stdin": "", "env": {}, "deadline_s": 5.0, "output_bytes": 9}
    async with served(monkeypatch, most=1) as url, asyncio.timeout(20):
        backend = RemoteBackend(url=url)
        sandbox: Any = await backend.create(LIMITS)
        asking = asyncio.create_task(backend.ask("POST", f"{sandbox._path}/exec", body, deadline_s=10.0))
        await begun.wait()
        if how == "is cancelled":
            asking.cancel()  # as if its process was killed: it sends no DELETE
        with pytest.raises((SandboxError, asyncio.CancelledError)):
            await asking
        await (await backend.create(LIMITS)).destroy()
        await backend.close()


@pytest.mark.parametrize("bound", ["of the server", "of open files"])
async def test_connections_to_a_server_are_bounded_and_end_when_they_are_idle(
    monkeypatch: pytest.MonkeyPatch, bound: str
):
    if bound == "of the server":
        monkeypatch.setattr("asyncrl.serve.sandboxes._CONNECTIONS", 1)
    else:  # 512 for whatever a process has open, 8 for the sandbox, 2 for connections
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (522, 522))
        monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    monkeypatch.setattr("asyncrl.serve.sandboxes._IDLE_S", 0.2)
    async with served(monkeypatch, most=1) as url, asyncio.timeout(20):
        port = int(url.rpartition(":")[2])
        idle, other, refused = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert (await refused[0].read()).startswith(b"HTTP/1.1 503")
        for reader, _ in (idle, other):
            assert await reader.read() == b""
        for _, writer in (idle, other, refused):
            writer.close()


async def test_a_server_that_may_open_too_few_files_for_its_sandboxes_does_not_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    with pytest.raises(ConfigError, match=r"most is 64, .*\nraise `ulimit -n` to 1152"):
        async with served(monkeypatch, most=64):
            pass
    async with served(monkeypatch, most=51):
        pass
