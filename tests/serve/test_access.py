"""Access control: every route of the table, on every plane, with every credential."""

from __future__ import annotations

import asyncio
import base64
import socket
import stat

import pytest

from asyncrl.errors import ConfigError
from asyncrl.serve.control_client import read_keys
from asyncrl.serve.limits import Limits
from asyncrl.serve.middleware import KeyRing
from asyncrl.serve.routes import ROUTES, access_status, routes_of
from asyncrl.serve.server import Binding

USER_KEY, OPERATOR_KEY = "user-key-0123456789", "operator-key-0123456789"
CREDENTIALS = {"anonymous": "", "unknown": "x" * 20, "user": USER_KEY, "operator": OPERATOR_KEY}


def keys():
    return KeyRing({"alice": USER_KEY}), KeyRing({"olga": OPERATOR_KEY})


def expected(route, plane, caller):
    """Return the status, by the rule in other terms than the code's."""
    if plane == "user" and route.plane == "control":
        return 404
    if route.access == "public":
        return 200
    opens = {"user": "user", "control": "operator"}[plane]
    if caller == opens:
        return 200
    return 403 if plane == "control" and caller == "user" else 401


def presented(key):
    """Return each set of headers that has ``key``, or no valid one."""
    if not key:
        return ({}, {"Authorization": "Basic !"}, {"Authorization": "Basic YQ=="})
    password = base64.b64encode(f"user:{key}".encode()).decode()
    return ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"Authorization": f"Basic {password}"})


async def test_each_route_answers_each_credential_as_declared(serve):
    users, operators = keys()
    async with serve(users=users, operators=operators, control_port=0) as served:
        planes = {"user": served.server.url, "control": served.server.control_url}
        for plane, url in planes.items():
            for route in ROUTES:
                for caller, key in CREDENTIALS.items():
                    for header in presented(key):
                        path = route.path.replace("{session}", "s").replace("{model}", "tiny")
                        async with served.client.request(
                            route.method, url + path, headers=header, data=b"no json"
                        ) as answer:
                            got = answer.status
                            await answer.read()
                        want = expected(route, plane, caller)
                        assert access_status(route, plane=plane, caller=caller, keyless=False) == want
                        where = (route.method, route.path, plane, caller, got)
                        if want == 200:  # allowed; the handler may answer otherwise
                            assert got not in (401, 403), where
                        else:
                            assert got == want, where
        probes = [request.prompt_token_ids for request in served.engines[0].requests]
        assert probes == [(0,)] * 6, "only callers that are allowed the deep probe generated anything"


async def test_without_keys_loopback_is_open_and_the_control_plane_is_not_on_it(serve):
    async with serve() as served:
        await served.get("/livez")
        await served.get("/v1/models")
        for route in ROUTES:
            if route.plane == "control":
                async with served.client.request(route.method, served.url + route.path, json={}) as answer:
                    assert answer.status == (
                        404 if route.path not in {each.path for each in routes_of("user")} else 405
                    )
        path = served.server.control_socket
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await served.control("GET", "/pool"))["pool"]["weight_version"] == 0
        assert await served.control("GET", "/v1/models")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_public_address_needs_a_key(host):
    with pytest.raises(ConfigError, match="no key is set"):
        Binding(host=host)
    Binding(host=host, users=keys()[0])


async def test_a_server_that_cannot_open_all_its_sockets_keeps_none(serve, tmp_path):
    _, operators = keys()
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other.bind(("127.0.0.1", 0))
        port, in_use = other.getsockname()[1], taken.getsockname()[1]
        other.close()
        with pytest.raises(ConfigError, match=f"cannot listen on .*:{in_use}") as refused:
            async with serve(operators=operators, port=port, control_port=in_use):
                raise AssertionError("not reached")
        assert refused.value.remedy == "give another --control-port"
    assert not (tmp_path / "control.sock").exists()
    async with serve(operators=operators, port=port, control_port=0) as served:
        assert served.server.url.endswith(f":{port}")


def test_a_control_port_needs_its_own_key():
    with pytest.raises(ConfigError, match="key of its own"):
        Binding(control_port=9000, users=keys()[0])


async def test_hosts_and_origins(serve):
    async with serve(hosts=("pool.local",), origins=("https://lab.example",)) as served:

        async def status(**headers):
            async with served.client.get(f"{served.url}/v1/models", headers=headers) as answer:
                return answer.status

        assert await status() == 200
        assert await status(Host="localhost") == 200
        assert await status(Host="pool.local:1234") == 200
        assert await status(Host="rebound.example:8000") == 403
        assert await status(Host="") == 403
        assert await status(Origin="https://evil.example") == 403
        assert await status(Origin="https://lab.example") == 200


async def test_sessions_belong_to_their_keys(serve):
    users = KeyRing({"alice": USER_KEY, "bob": OPERATOR_KEY})
    async with serve(users=users) as served:
        mine, other = ({"x-api-key": key} for key in (USER_KEY, OPERATOR_KEY))
        body = {"prompt_token_ids": [5]}
        await served.post("/sessions/s/generate", body, headers=mine)
        await served.get("/sessions/s", headers=mine)
        await served.get("/sessions/s", headers=other, status=404)
        await served.post("/sessions/s/reward", {"reward": 1.0}, headers=other, status=404)


async def test_keys_of_both_planes_have_sessions_and_places_of_their_own(serve):
    users, operators = KeyRing({"key-1": USER_KEY}), KeyRing({"key-1": OPERATOR_KEY})
    limits = Limits(concurrent_requests_per_key=1)
    async with serve(users=users, operators=operators, control_port=0, limits=limits) as served:
        mine, url = {"x-api-key": OPERATOR_KEY}, f"{served.server.control_url}/sessions/s/generate"
        served.state.concurrency.acquire("user key-1")
        async with served.client.post(url, json={"prompt_token_ids": [5]}, headers=mine) as answer:
            assert answer.status == 200
        served.state.concurrency.release("user key-1")
        await served.get("/sessions/s", headers={"x-api-key": USER_KEY}, status=404)


def test_keys_are_read_and_never_shown(tmp_path, monkeypatch, caplog):
    file = tmp_path / "keys"
    file.write_text(f"# ours\nalice = {USER_KEY}\n{OPERATOR_KEY}  # without a name\n")
    ring = KeyRing(read_keys(file))
    assert "can be read by other users of this machine; chmod 600" in caplog.text
    file.chmod(0o600)
    caplog.clear()
    assert ring.holder_of(USER_KEY) == "alice"
    assert ring.holder_of(OPERATOR_KEY) == "key-3"
    assert ring.holder_of(USER_KEY[:-1]) is None
    assert ring.holder_of("") is None
    assert USER_KEY not in repr(ring) + str(vars(ring))
    assert read_keys(file)
    assert not caplog.text
    for wrong in ("", "short\n", f"a = {USER_KEY}\na = {OPERATOR_KEY}\n", "key with spaces 0123456789\n"):
        file.write_text(wrong)
        with pytest.raises(ConfigError) as error:
            KeyRing(read_keys(file))
        assert USER_KEY not in str(error.value)
    file.write_text(f"{USER_KEY}#more\nalice={OPERATOR_KEY}\n")
    with pytest.raises(ConfigError, match="keys:2: a key with = in the middle"):
        KeyRing(read_keys(file))
    file.write_text(f"{USER_KEY}#more\n{OPERATOR_KEY}==\t# base64\n")
    ring = KeyRing(read_keys(file))
    assert [ring.holder_of(key) for key in (f"{USER_KEY}#more", USER_KEY, f"{OPERATOR_KEY}==")] == [
        "key-1",
        None,
        "key-2",
    ]
    monkeypatch.setenv("ASYNCRL_TEST_KEY", USER_KEY)
    assert KeyRing.from_environment("ASYNCRL_TEST_KEY").holder_of(USER_KEY) == "environment"
    assert KeyRing.from_environment("ASYNCRL_NO_KEY") is None


async def test_a_key_is_not_in_the_log(serve, caplog):
    async with serve(users=keys()[0]) as served:
        async with served.client.get(f"{served.url}/v1/models", headers={"x-api-key": "w" * 30}) as answer:
            assert answer.status == 401
            assert "w" * 30 not in await answer.text() + caplog.text
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        writer.write(f"GET / HTTP/1.1\r\nHost: localhost\r\nx-api-key: {'w' * 30}\x00\r\n\r\n".encode())
        assert b" 400 " in await reader.read(65_536)
        writer.close()
        assert "w" * 30 not in caplog.text
