"""`asyncrl page`: runs in the browser."""

from __future__ import annotations

import argparse
import asyncio
import threading
import webbrowser
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from tempfile import NamedTemporaryFile

from asyncrl.cli.output import show


def add_page_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_OR_FOLDER", help="a run, or the folder of runs")
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (any that is free)")
    parser.add_argument("--open", action="store_true", help="open it in the browser of this machine")


def page_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """Serve the page until Ctrl-C."""

    async def serve() -> None:
        async with _serving(namespace.folder, namespace.host, namespace.port) as url:
            show(f"{url}\nCtrl-C ends it")
            with _redirect(url) if namespace.open else nullcontext() as address:
                if address is not None:
                    await asyncio.to_thread(webbrowser.open, address)
                await asyncio.Event().wait()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        return 0
    return 0


@contextmanager
def _redirect(url: str) -> Iterator[str]:
    """Yield the address of a file that leads to ``url``; only this user may read it, but all users a browser's command.

    It is removed at the end of the block.
    """
    with NamedTemporaryFile("w", prefix="asyncrl-page-", suffix=".html") as file:
        file.write(f'<meta http-equiv="refresh" content="0;url={url}">')
        file.flush()
        yield Path(file.name).as_uri()


@contextmanager
def page_beside(folder: Path) -> Iterator[str]:
    """Serve the runs in ``folder``, which is made, from a thread inside the block; yield the address."""
    folder.mkdir(parents=True, exist_ok=True)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        serving = _serving(folder, "127.0.0.1", 0)
        url = runner.run(serving.__aenter__())
        thread = threading.Thread(target=loop.run_forever, name="asyncrl-page", daemon=True)
        thread.start()
        try:
            yield url
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            runner.run(serving.__aexit__(None, None, None))


@asynccontextmanager
async def _serving(folder: Path, host: str, port: int) -> AsyncIterator[str]:
    from asyncrl.page.server import PageServer

    server = PageServer(folder, host=host, port=port)
    async with server.serving():
        yield server.url
