"""The page answers who has its token, on loopback names, about runs by name; a folder may hold anything."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl.errors import ConfigError
from asyncrl.page.runs import RunFolder
from asyncrl.page.server import PageServer
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.timeline import Timeline

HOSTILE = "<img src=x onerror=alert(1)>"


def made(root: Path, name: str = "run", *, steps: int = 4) -> Path:
    with RunDirectory.create(root, name) as run:
        run.write_config("name = 'run'\n")
        for step in range(1, steps + 1):
            run.log_metrics({"reward_mean": step / 10, "train/lr": 1e-3}, step=step, version=step)
            tokens = [["2+2="], ["4", -0.1, step - 1]]
            record = {"text": f"{HOSTILE} {step}", "reward": step / 10, "finish": "done", "tokens": tokens}
            run.log_trajectory({"step": step, "group_id": step, "task": {"answer": step}, **record})
        run.log_metrics({"eval/success": 0.5}, step=steps, version=steps)
        Timeline().save(run.timeline_path)
    return run.path


@pytest.fixture
async def page(tmp_path: Path):
    made(tmp_path)
    server = PageServer(tmp_path)
    cookies = aiohttp.CookieJar(unsafe=True)  # also of addresses that are numbers
    async with server.serving(), aiohttp.ClientSession(cookie_jar=cookies) as session:
        yield server, session


def base(server: PageServer) -> str:
    return server.url.partition("/?")[0]


async def answer(page: Any, path: str, **headers: str) -> tuple[int, Any]:
    server, session = page
    token = {"Authorization": f"Bearer {server.token}"} if "Authorization" not in headers else {}
    async with session.get(base(server) + path, headers={**token, **headers}, allow_redirects=False) as found:
        text = await found.text()
        return found.status, json.loads(text) if found.content_type == "application/json" else text


async def test_the_address_gives_a_cookie_and_the_page(page):
    server, session = page
    async with session.get(server.url) as found:
        assert found.status == 200
        assert str(found.url) == base(server) + "/"  # the token does not stay in the address
        assert "default-src 'none'" in found.headers["Content-Security-Policy"]
        assert "<script src=" in await found.text()
    async with session.get(base(server) + "/api/runs") as found:
        assert found.status == 200


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/runs", "/api/runs/run/overview", "/?token=", "/?token=é"])
async def test_without_the_token_nothing_is_answered(page, path: str):
    status, text = await answer(page, path, Authorization="Bearer wrong")
    assert status == 401
    assert "runs" not in text


async def test_bytes_that_are_no_text_are_not_the_token(page):
    server, _session = page
    reader, writer = await asyncio.open_connection("127.0.0.1", server._port)
    writer.write(b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"401"
    writer.close()


async def test_streams_that_are_opened_at_once_are_counted(page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asyncrl.page.server._MOST_STREAMS", 2)
    server, session = page
    (path,) = tmp_path.iterdir()
    token = {"Authorization": f"Bearer {server.token}"}

    async def status(name: str) -> int:
        found = await session.get(f"{base(server)}/api/runs/{name}/events", headers=token)
        return int(found.status)

    for _stream in range(3):
        assert await status("absent") == 404  # and is none
    opened = await asyncio.gather(*(status(path.name) for _stream in range(5)))
    assert sorted(opened) == [200, 200, 429, 429, 429]


async def test_a_name_of_elsewhere_is_refused(page):
    status, _text = await answer(page, "/api/runs", Host="evil.example")
    assert status == 403


async def test_a_run_is_shown(page, tmp_path: Path):
    (name,) = [path.name for path in tmp_path.iterdir()]
    _status, runs = await answer(page, "/api/runs")
    assert runs["runs"] == [
        {"name": name, "state": "ended", "step": 4, "steps": None, "reward": 0.4, "success": 0.5, "time_s": 0.0}
        | {"time_s": runs["runs"][0]["time_s"]}
    ]
    _status, overview = await answer(page, f"/api/runs/{name}/overview")
    assert overview["curves"]["reward_mean"] == [0.1, 0.2, 0.3, 0.4]
    assert overview["scores"]["eval/success"] == [0.5]
    for view in ("failures", "timeline"):
        assert (await answer(page, f"/api/runs/{name}/{view}"))[0] == 200


async def test_rollouts_are_chosen_and_read(page, tmp_path: Path):
    (name,) = [path.name for path in tmp_path.iterdir()]

    async def numbers(query: str) -> list[int]:
        status, found = await answer(page, f"/api/runs/{name}/rollouts?{query}")
        assert status == 200
        return [each["number"] for each in found["rollouts"]]

    assert await numbers("") == [3, 2, 1, 0]
    assert await numbers("step=2") == [1]
    assert await numbers("least=0.15&most=0.35") == [2, 1]
    assert await numbers("text=ONERROR%3Dalert(1)%3E 3") == [2]
    assert await numbers("longer=3") == []
    assert await numbers("count=2") == [3, 2]
    assert await numbers("before=2") == [1, 0]
    status, found = await answer(page, f"/api/runs/{name}/rollouts/2")
    assert (status, found["tokens"]) == (200, [["2+2="], ["4", -0.1, 2]])
    for wrong in ("rollouts?step=x", "rollouts?least=nan", "timeline?bins=0", "timeline?start=inf", "rollouts/x"):
        assert (await answer(page, f"/api/runs/{name}/{wrong}"))[0] == 400, wrong
    for absent in ("rollouts/99", "rollouts/-1"):
        assert (await answer(page, f"/api/runs/{name}/{absent}"))[0] == 404, absent


@pytest.mark.parametrize("name", ["..", "%2e%2e", "..%2f..", "%2fetc", "none", ".", "%00"])
async def test_a_name_is_never_a_path(page, name: str):
    assert (await answer(page, f"/api/runs/{name}/overview"))[0] == 404


async def test_changes_are_told(page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asyncrl.page.server._LOOK_S", 0.05)
    server, session = page
    (path,) = tmp_path.iterdir()
    token = {"Authorization": f"Bearer {server.token}"}
    async with session.get(f"{base(server)}/api/runs/{path.name}/events", headers=token) as found:

        async def told() -> list[str]:
            async with asyncio.timeout(5):
                while not (line := await found.content.readline()).startswith(b"data:"):
                    pass
            names: list[str] = json.loads(line.partition(b":")[2])
            return names

        assert set(await told()) >= {"metrics.jsonl", "run.lock"}
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "reward_mean": 0.9}\n')
        assert await told() == ["metrics.jsonl"]
        with (path / "run.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as the run does
            assert await told() == ["run.lock"]
        assert await told() == ["run.lock"]
    assert (await answer(page, f"/api/runs/{path.name}/overview"))[1]["step"] == 5


async def test_the_end_of_the_server_ends_open_streams(tmp_path: Path):
    path = made(tmp_path)
    server = PageServer(tmp_path)
    async with aiohttp.ClientSession() as session:
        async with asyncio.timeout(10), server.serving():
            token = {"Authorization": f"Bearer {server.token}"}
            stream = await session.get(f"{base(server)}/api/runs/{path.name}/events", headers=token)
        assert stream.status == 200


DAMAGES = [b"", b"\xff\xfe\x00", b"[1, 2]", b"{", b"null", b'{"a": 1}\n{"step": "x", "reward_mean": []}\n', b"9" * 100]
DAMAGES += [b'{"step": 1, "reward_mean": 1%b}\n' % (b"0" * 400)]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "file", ["metrics.jsonl", "trajectories.jsonl", "status.json", "summary.json", "timeline.json", "config.toml"]
)
def test_a_damaged_file_does_not_hide_the_others(tmp_path: Path, file: str, damage: bytes):
    path = made(tmp_path)
    (path / file).write_bytes(damage)
    run = RunFolder(path)
    assert run.line()["state"] in ("ended", "finished")
    json.dumps([run.overview(), run.failures(), run.timeline(0, None, 100), run.rollouts()])
    if file != "metrics.jsonl":
        assert run.overview()["step"] == 4
    if file != "trajectories.jsonl":
        assert run.rollouts()["all"] == 4


@pytest.mark.parametrize("file", ["metrics.jsonl", "status.json", "timeline.json", "logs", "run.lock"])
def test_a_folder_or_nothing_in_the_place_of_a_file(tmp_path: Path, file: str):
    path = made(tmp_path)
    for child in (path / file).iterdir() if (path / file).is_dir() else ():
        child.unlink()
    (path / file).rmdir() if (path / file).is_dir() else (path / file).unlink(missing_ok=True)
    for make in (lambda: None, (path / file).mkdir):
        make()
        run = RunFolder(path)
        json.dumps(
            [run.line(), run.overview(), run.failures(), run.timeline(0, None, 10), run.rollouts(), run.stamps()]
        )


def test_wrong_places_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a folder"):
        PageServer(tmp_path / "absent")
    with pytest.raises(ConfigError, match="loopback"):
        PageServer(tmp_path, host="0.0.0.0")
    with pytest.raises(ConfigError, match="is not a port"):
        PageServer(tmp_path, port=70_000)


async def test_a_port_in_use_is_named(tmp_path: Path):
    first = PageServer(tmp_path)
    async with first.serving():
        port = int(first.url.split(":")[2].partition("/")[0])
        with pytest.raises(ConfigError, match="in use"):
            async with PageServer(tmp_path, port=port).serving():
                pass


def test_a_run_that_trains_is_told_from_one_that_ended(tmp_path: Path):
    with RunDirectory.create(tmp_path, "run") as run:
        run.write_config("")
        assert RunFolder(run.path).state() == "training"
    assert RunFolder(run.path).state() == "ended"
    os.utime(run.path)
    run.write_summary({})
    assert RunFolder(run.path).state() == "finished"
