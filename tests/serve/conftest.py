"""A real server on real sockets, over scripted replicas."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.serve.call import ServerState
from asyncrl.serve.limits import Limits
from asyncrl.serve.middleware import KeyRing
from asyncrl.serve.server import Binding, Server
from asyncrl.serve.sessions import FolderSink, GroupedSink, TrajectorySink
from asyncrl.serve.text import ModelText
from asyncrl.testing import ScriptedEngine
from engines.training.scratch import make_scratch_tokenizer

USER_KEY, OTHER_KEY, OPERATOR_KEY = "user-key-0123456789", "other-key-0123456789", "operator-key-0123456789"
USERS = KeyRing({"alice": USER_KEY, "bob": OTHER_KEY})
OPERATORS = KeyRing({"olga": OPERATOR_KEY})


@pytest.fixture
def watch_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, bool]]:
    """Returns, for functions given by owner and name, whether the last call of each was in the event loop's thread."""

    def watch(*functions: tuple[Any, str]) -> dict[str, bool]:
        on_the_loop: dict[str, bool] = {}

        def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                on_the_loop[name] = threading.current_thread() is threading.main_thread()
                return work(*arguments, **options)

            return call

        for owner, name in functions:
            monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
        return on_the_loop

    return watch


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_scratch_tokenizer(
        [
            [{"role": "user", "content": "what is seven times eight"}, {"role": "assistant", "content": "fifty-six"}],
            [{"role": "user", "content": "say it again please"}, {"role": "assistant", "content": "it again, gladly"}],
        ]
        * 4
    )


@pytest.fixture(scope="session")
def text(tokenizer: Any) -> ModelText:
    return ModelText(tokenizer)


@dataclass
class Served:
    """A running server with clients of both planes."""

    server: Server
    state: ServerState
    engines: list[ScriptedEngine]
    client: aiohttp.ClientSession
    folder: Path
    operator: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.server.url

    async def post(self, path: str, body: Any, *, headers: dict[str, str] | None = None, status: int = 200) -> Any:
        async with self.client.post(self.url + path, json=body, headers=headers) as answer:
            content = await answer.json()
            assert answer.status == status, content
            return content

    async def get(self, path: str, *, headers: dict[str, str] | None = None, status: int = 200) -> Any:
        async with self.client.get(self.url + path, headers=headers) as answer:
            content = await answer.json()
            assert answer.status == status, content
            return content

    async def events(self, path: str, body: Any, *, headers: dict[str, str] | None = None) -> list[str]:
        async with self.client.post(self.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            return [line.decode().strip() async for line in answer.content if line.strip()]

    async def control(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        async with self.operator.request(method, f"http://localhost{path}", json=body) as answer:
            content = await answer.json()
            assert answer.status == status, content
            return content


Serve = Callable[..., Any]


@pytest.fixture
def serve(text: ModelText, tmp_path: Path) -> Serve:
    """``async with serve(reply, ...) as served``; the engine answers ``reply(prompt)``, ids or text."""

    @asynccontextmanager
    async def start(
        reply: Callable[[tuple[int, ...]], Sequence[int] | str] = lambda prompt: [7, 8, 9],
        *,
        replicas: int = 1,
        limits: Limits | None = None,
        token_s: float = 0.0,
        with_text: bool = True,
        grammars: bool = True,
        capture: TrajectorySink | None = None,
        **binding: Any,
    ) -> AsyncIterator[Served]:
        def script(prompt: tuple[int, ...]) -> Sequence[int]:
            answer = reply(prompt)
            if not isinstance(answer, str):
                return answer
            return text.renderer.tokenizer.encode(answer, add_special_tokens=False)

        engines: list[ScriptedEngine] = []

        def engine() -> ScriptedEngine:
            engines.append(ScriptedEngine(script, token_s=token_s, log_prob=-0.5, grammars=grammars))
            return engines[-1]

        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(ReplicaPool({f"r{n}": engine for n in range(replicas)}))
            state = ServerState(
                pool=pool,
                names=("tiny", "alias"),
                text=text if with_text else None,
                limits=limits or Limits(),
                capture=GroupedSink(capture or FolderSink(tmp_path / "captured")),
                new_replica=lambda _name: engine,
            )
            assert state.capture is not None
            stack.push_async_callback(state.capture.close)
            server = Server(state, Binding(**{"port": 0, "control_socket": tmp_path / "control.sock"} | binding))
            await server.start()
            stack.push_async_callback(server.close)
            client = await stack.enter_async_context(aiohttp.ClientSession())
            unix = aiohttp.UnixConnector(path=str(tmp_path / "control.sock"))
            operator = await stack.enter_async_context(aiohttp.ClientSession(connector=unix))
            yield Served(server, state, engines, client, tmp_path / "captured", operator)
        await asyncio.sleep(0)

    return start
