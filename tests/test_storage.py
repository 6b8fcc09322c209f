"""Files at URLs: what is fetched, what is refused, and under which names errors come."""

from __future__ import annotations

import base64
import errno
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from aiohttp import ClientTimeout
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from asyncrl.config import Config
from asyncrl.datasets import open_sources
from asyncrl.errors import ConfigError, StorageError
from asyncrl.model_folder import check_model
from asyncrl.storage import (
    Store,
    holds_secret,
    is_url,
    local_copy,
    local_model,
    origin,
    path_below,
    publish_folder,
    without_secrets,
)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_a_url_has_a_protocol():
    assert all(map(is_url, ("s3://bucket/a", "memory://a")))
    assert not any(map(is_url, ("gguf:a", "org/name", "/a://b", "", "C:\\a", 3, Path("s3://a"))))


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_what_is_written_is_read_and_removed(protocol: str, tmp_path: Path):
    store = Store(f"{protocol}://{tmp_path}/bucket/")
    assert store.names() == []
    store.write("folder/first", b"1")
    (tmp_path / "local").write_bytes(b"22")
    store.put({"folder/inner/second": tmp_path / "local"})
    store.write("third", b"3")
    assert store.names() == ["folder/first", "folder/inner/second", "third"]
    store.get("folder/inner/second", tmp_path / "copies" / "second", size_bytes=2)
    store.get("folder/first", tmp_path / "copies" / "first", size_bytes=1)
    assert (tmp_path / "copies" / "first").read_bytes() == b"1"
    assert (tmp_path / "copies" / "second").read_bytes() == b"22"
    store.remove("folder/first")
    store.remove("folder/first")
    store.remove("absent")
    assert store.names() == ["folder/inner/second", "third"]
    store.remove("folder")
    assert store.names() == ["third"]
    with pytest.raises(FileNotFoundError):
        store.get("folder/first", tmp_path / "first", size_bytes=1)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/a",
        "gs://user@bucket/a",
        "s3://key:se/cret@bucket/a",
        "hf://key:secret@bucket",
        "https://host/rows.jsonl?X-Amz-Signature=secret",
        "https://host:80/rows.jsonl?part=1&sig=secret",
    ],
)
def test_a_url_with_a_password_is_refused_and_not_shown(url: str):
    for use in (Store, local_copy, local_model):
        with pytest.raises(ConfigError, match="holds a user, a password or a signature") as caught:
            use(url)
        assert not any(each in str(caught.value) for each in ("secret", "user@"))


@pytest.mark.parametrize(
    "table",
    [
        {"checkpoint": {"url": "s3://key:se/cret@bucket"}},
        {"model": {"path": "https://host/model?sig=secret"}},
        {"model": {"path": "s3://key:secret@bucket/model"}},
        {"checkpoint": {"url": "s3://key:secret@bucket"}},
        {"env": {"name": "dataset", "options": {"files": ["a.parquet", "s3://key:secret@bucket/rows.parquet"]}}},
        {"env": {"name": "dataset", "options": {"sources": [{"files": "s3://key:secret@bucket/rows.parquet"}]}}},
    ],
)
def test_a_configuration_holds_no_password(table: dict[str, Any]):
    tables = {"name": "a", "steps": 1, "model": {"source": "scratch"}, "env": {"name": "calculator"}, **table}
    with pytest.raises(ConfigError, match="must hold no user, password or signature") as caught:
        Config.from_mapping(tables)
    assert "secret" not in f"{caught.value}{caught.value.__cause__}{caught.value.__context__}"


def test_a_protocol_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        ConfigError, match=r"gs://bucket' needs the package gcsfs; install it: .* -m pip install 'gcsfs"
    ):
        Store("gs://bucket", key="checkpoint.url")
    with pytest.raises(ConfigError, match="cannot be opened; Protocol not known: nothing"):
        Store("nothing://bucket")


class Broken(MemoryFileSystem):
    protocol = "broken"
    error: Exception = OSError()

    def ls(self, path: str, *_: Any, **__: Any) -> Any:
        raise Broken.error

    pipe_file = put_file = get_file = find = info = rm = ls


class NoBucket(Exception):
    def __init__(self) -> None:
        super().__init__()
        self.response = {"Error": {"Code": "NoSuchBucket"}}


def no_bucket() -> FileNotFoundError:
    error = FileNotFoundError("bucket/a")
    error.__cause__ = NoBucket()
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PermissionError("Forbidden"), r"access is refused \(PermissionError: Forbidden\); check the credentials"),
        (no_bucket(), "there is no such bucket"),
        (OSError(errno.ENOSPC, "No space left on device"), r"a disk cannot be written .*; free space on it"),
        (ConnectionError("refused"), r"it cannot be used \(ConnectionError: refused\); check the connection"),
        (RuntimeError("what a library raises"), r"it cannot be used \(RuntimeError: what a library raises\)"),
        (
            OSError("403, url='https://h/a?X-Amz-Signature=abc'"),
            r"it cannot be used \(OSError: 403, url='https://h/a\?\.\.\.'\)",
        ),
    ],
)
def test_what_a_store_answers_has_a_name_and_the_url(error: Exception, text: str, tmp_path: Path):
    fsspec.register_implementation("broken", Broken, clobber=True)
    Broken.error = error
    store = Store("broken://bucket")
    (tmp_path / "file").touch()
    for use in (
        store.names,
        lambda: store.write("a", b""),
        lambda: store.put({"a": tmp_path / "file"}),
        lambda: store.get("a", tmp_path / "a", size_bytes=1),
        lambda: store.remove("a"),
        lambda: local_copy("broken://bucket/a"),
    ):
        with pytest.raises(StorageError, match=rf"broken://bucket.*: {text}"):
            use()


def test_a_store_that_does_not_answer_is_given_up(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch):
    answers = threading.Event()
    monkeypatch.setenv("ASYNCRL_STORE_TIMEOUT_S", "0")
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_: answers.wait())
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *_: answers.wait())
    (empty := Path(os.environ["ASYNCRL_CACHE"])).touch()
    for use in (
        lambda: Store("memory://a").put({"a": empty}),
        lambda: Store("memory://a").get("a", empty, size_bytes=0),
    ):
        with pytest.raises(StorageError, match=r"memory://a/a: it cannot be used \(TimeoutError: no answer for 0 s"):
            use()
    answers.set()


@pytest.mark.parametrize(
    "url",
    [
        "abfss://container@account.dfs.core.windows.net/a",
        "hf://gpt2@main",
        "s3://bucket/rows-?.jsonl",
        "https://h:1/a?version=1",
    ],
)
def test_a_url_without_a_secret_is_one(url: str):
    assert not holds_secret(url)
    assert without_secrets(url) == url


# ---------------------------------------------------------------------------------------------------- models and rows


def test_a_file_is_fetched_once_and_again_when_it_has_changed(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
):
    memory.pipe_file("/data/rows.jsonl", b'{"prompt": "a"}\n')
    fetched: list[str] = []
    get_file = MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "get_file",
        lambda self, path, *rest, **more: fetched.append(path) or get_file(self, path, *rest, **more),
    )
    first = local_copy("memory://data/rows.jsonl")
    assert local_copy("memory://data/rows.jsonl") == first
    assert first.name == "rows.jsonl"
    memory.pipe_file("/data/rows.jsonl", b'{"prompt": "b"}\n')
    (source,) = open_sources("memory://data/rows.jsonl")
    assert source[0] == {"prompt": "b"}
    assert first.read_text() == '{"prompt": "a"}\n'  # of a run that reads it
    assert fetched == ["/data/rows.jsonl"] * 2


def test_a_copy_is_named_by_its_url_where_others_read_the_name(memory: MemoryFileSystem, tmp_path: Path):
    memory.pipe_file("/bucket/base/config.json", b"{}")
    assert origin(local_model("memory://bucket/base")) == "memory://bucket/base"
    (tmp_path / ".url").write_text("memory://of/another")
    assert origin(str(tmp_path / "base")) == str(tmp_path / "base")
    assert origin("org/name") == "org/name"


def test_folders_and_patterns_at_urls_are_those_of_files(memory: MemoryFileSystem):
    for name in ("b.jsonl", "a.jsonl", "other.txt", "inner/c.jsonl"):
        memory.pipe_file(f"/data/{name}", b'{"name": "%s"}\n' % name.encode())

    def names(files: str) -> list[str]:
        return [source[0]["name"] for source in open_sources(files)]

    assert names("memory://data") == names("memory://data/") == names("memory://data/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("memory://data/**/*.jsonl") == ["a.jsonl", "b.jsonl", "inner/c.jsonl"]
    with pytest.raises(ConfigError, match=r"files = 'memory://data/d.jsonl': there is nothing"):
        open_sources("memory://data/d.jsonl")
    with pytest.raises(ConfigError, match="there is nothing"):
        open_sources("memory://data/*.parquet")


@pytest.mark.parametrize("name", ["../../escaped", "a/../../../escaped"])
def test_a_store_writes_nothing_outside_of_the_folder_of_a_copy(memory: MemoryFileSystem, tmp_path: Path, name: str):
    memory.pipe_file("/model/config.json", b"{}")
    MemoryFileSystem.store[f"/model/{name}"] = MemoryFile(memory, f"/model/{name}", b"1")
    with pytest.raises(StorageError, match="outside of its folder"):
        local_copy("memory://model")
    assert not list(tmp_path.rglob("escaped"))
    with pytest.raises(StorageError, match="outside of its folder"):
        path_below(tmp_path, "/etc/passwd")


def test_a_model_that_changes_while_it_is_fetched_is_not_kept(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
):
    for name in ("a", "b"):
        memory.pipe_file(f"/model/{name}", b"old")
    get_file = MemoryFileSystem.get_file

    def get(self: Any, path: str, *rest: Any, **more: Any) -> None:
        get_file(self, path, *rest, **more)
        if path == "/model/a":
            for name in ("a", "b"):
                memory.pipe_file(f"/model/{name}", b"new")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", get)
        with pytest.raises(StorageError, match="its files changed while they were read; try again"):
            local_copy("memory://model")
    assert {path.read_text() for path in local_copy("memory://model").iterdir()} == {"new"}


def test_a_file_of_a_web_server_is_fetched(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with serving(partial(QuietFiles, directory=str(tmp_path))) as address:
        (source,) = open_sources(f"{address}/rows.jsonl")
        assert source[0] == {"prompt": "a"}
        with pytest.raises(ConfigError, match="there is nothing"):
            open_sources(f"{address}/absent.jsonl")
        (tmp_path / "rows.jsonl").rename(tmp_path / "get")
        (source,) = open_sources(f"{address}/get?file=of/rows.jsonl")  # the query has its name
        assert source[0] == {"prompt": "a"}


def test_a_file_of_a_web_server_is_that_of_its_address_wherever_it_lies_and_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", ClientTimeout(total=1e-6))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with serving(partial(SignedFiles, directory=str(tmp_path))) as address:
        url = f"{address}/rows.jsonl?path=a/b"
        copy = local_copy(url)
        assert (copy.name, copy.read_text()) == ("rows.jsonl", '{"prompt": "a"}\n')
        assert local_copy(url) == copy


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


class SignedFiles(QuietFiles):
    """Redirects each request to another URL, which it signs."""

    numbers = itertools.count()

    def send_head(self) -> Any:
        if "Signature" in self.path:
            return super().send_head()
        self.send_response(302)
        self.send_header("Location", f"/rows.jsonl?X-Amz-Signature={next(self.numbers)}")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None


def test_a_fetch_that_is_cut_off_leaves_nothing_behind(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch):
    memory.pipe_file("/model/config.json", b"{}")
    memory.pipe_file("/model/weights", b"12")
    with monkeypatch.context() as patch:
        get_file = MemoryFileSystem.get_file

        def cut(self: Any, path: str, *rest: Any, **more: Any) -> None:
            if path.endswith("weights"):
                raise ConnectionError("reset")
            get_file(self, path, *rest, **more)

        patch.setattr(MemoryFileSystem, "get_file", cut)
        with pytest.raises(StorageError, match=r"memory://model.*reset"):
            local_copy("memory://model")
    folder = local_copy("memory://model")
    assert folder.name == "model"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"config.json": b"{}", "weights": b"12"}


@pytest.mark.parametrize(
    ("model", "loaded"),
    [("org/name", "org/name"), ("a/folder", "a/folder"), ("hf://org/name", "org/name"), ("hf://gpt2/", "gpt2")],
)
def test_a_model_of_the_hub_keeps_its_name(model: str, loaded: str):
    assert local_model(model) == loaded


def test_a_model_at_a_url_is_one_when_it_has_its_config(memory: MemoryFileSystem):
    memory.pipe_file("/bucket/model/model.safetensors", b"")
    with pytest.raises(ConfigError, match=r"memory://bucket/model' has no config.json; give the URL of a model"):
        local_model("memory://bucket/model")
    memory.pipe_file("/bucket/model/config.json", b"{}")
    assert (Path(local_model("memory://bucket/model")) / "config.json").read_text() == "{}"


def test_a_check_of_a_model_at_a_url_fetches_no_weights(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch):
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json"):
        memory.pipe_file(f"/bucket/model/{name}", b'{"model_type": "gpt2"}')
    fetched: list[str] = []
    get_file = MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda self, path, *rest, **_: fetched.append(path) or get_file(self, path, *rest)
    )
    assert check_model("memory://bucket/model", key="model").model_type == "gpt2"
    assert sorted(fetched) == ["/bucket/model/config.json", "/bucket/model/tokenizer.json"]
    assert (Path(local_model("memory://bucket/model")) / "model.safetensors").is_file()


def test_the_file_that_makes_a_model_is_published_last(
    memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name)
    written: list[str] = []
    put_file = MemoryFileSystem.put_file

    def put(self: Any, lpath: str, rpath: str, **more: Any) -> None:
        written.append(rpath)
        put_file(self, lpath, rpath, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put)
    publish_folder(tmp_path, "memory://bucket/model", last="config.json")
    assert sorted(written) == [
        f"/bucket/model/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")
    ]
    assert written[-1] == "/bucket/model/config.json"
    with pytest.raises(ConfigError, match="--out = 'memory://bucket/model' exists"):
        publish_folder(tmp_path, "memory://bucket/model", last="config.json")


# ------------------------------------------------------------------------------------------------------------ the hub


class Hub(BaseHTTPRequestHandler):
    """The hub's API as far as one commit to a repository, and reading it, need."""

    files: ClassVar[dict[str, bytes]] = {}
    made: ClassVar[dict[str, Any]] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != "Bearer hf_of_a_writer":
            self.answer({"error": "Invalid username or password."}, status=401)
        elif path == "/api/repos/create":
            Hub.made = json.loads(body)
            self.answer({"url": self.address + "/owner/name"})
        elif path == "/api/models/owner/name/preupload/main":
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif path == "/api/models/owner/name/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    Hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del Hub.files[line["value"]["path"]]
            self.answer({"commitUrl": self.address + "/owner/name/commit/1", "commitOid": "1" * 40})
        else:
            self.answer({}, status=404)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/owner/name/tree/"):
            self.answer(
                [{"type": "file", "path": each, "size": len(Hub.files[each]), "oid": "0" * 40} for each in Hub.files]
            )
        elif path.startswith("/api/models/owner/name"):
            self.answer({"id": "owner/name", "sha": "1" * 40, "siblings": [{"rfilename": each} for each in Hub.files]})
        elif path.startswith("/owner/name/resolve/") and name in Hub.files:
            self.answer(Hub.files[name])
        else:
            self.answer({}, status=404)

    do_HEAD = do_GET

    def answer(self, value: Any, *, status: int = 200) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"' + "0" * 40 + '"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @property
    def address(self) -> str:
        return f"http://{self.headers['Host']}"

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.slow
def test_an_export_is_pushed_to_the_hub_and_read_from_there(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    Hub.files = dict.fromkeys(("README.md", "adapter_config.json", "model-00001-of-00002.safetensors"), b"old")
    program = (
        "import pathlib, sys; from asyncrl.storage import publish_folder, local_copy\n"
        "publish_folder(pathlib.Path(sys.argv[1]), 'hf://owner/name', last='config.json')\n"
        "print(*(f'{each.name}:{each.stat().st_size}' for each in sorted(local_copy('hf://owner/name@main').iterdir())))\n"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"

        def pushed(token: str) -> subprocess.CompletedProcess[str]:
            environment = {**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HOME": str(tmp_path / "home")}
            environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
            return subprocess.run(
                [sys.executable, "-c", program, str(folder)],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )

        try:
            done = pushed("hf_of_a_writer")
            refused = pushed("hf_of_another")
        finally:
            server.shutdown()
            thread.join()
    assert done.stdout == "README.md:3 config.json:2 model.safetensors:1000\n", done.stderr
    assert Hub.made["visibility" if "visibility" in Hub.made else "private"] in ("private", True)
    assert "StorageError: hf://owner/name: " in refused.stderr
    assert "HF_TOKEN" in refused.stderr
    assert "hf_of_another" not in refused.stderr
