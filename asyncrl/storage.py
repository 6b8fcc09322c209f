"""Files at URLs: ``s3://``, ``gs://``, ``file://``, ``memory://``, ``hf://``, and whatever else fsspec reads.

No other module opens a URL. Retries and credentials are those of fsspec's packages (s3fs, gcsfs, huggingface_hub),
which read them from the environment: a URL that holds a user, a password or a signature is refused. No call takes
longer than ``ASYNCRL_STORE_TIMEOUT_S`` (300) and the time of its bytes at 1 MB/s; one that hangs is left behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

import xxhash

from asyncrl.errors import ConfigError, StorageError
from asyncrl.io import DurableFiles
from asyncrl.plugins import install_command

_CREDENTIALS = {
    "s3fs": " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_ENDPOINT_URL)",
    "gcsfs": " (GOOGLE_APPLICATION_CREDENTIALS)",
    "huggingface_hub": " (HF_TOKEN, HF_ENDPOINT)",
}
# A password may hold any character but "@"; abfs://container@account and hf://owner@revision hold none.
_USER = re.compile(r"://[^@?#]*:[^@]*@|(?<!\babfs)(?<!\babfss)(?<!\bhf)://[^/?#]*@")
_SIGNATURE = re.compile(
    r"(://[^?#\s]*)\?[^\s\"']*(?:sig|token|key|secret|credential)[^\s\"'=]*=[^\s\"']*", re.IGNORECASE
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_ORIGIN = ".url"
_WEB = ("http://", "https://")

_T = TypeVar("_T")


def is_url(text: object) -> bool:
    return isinstance(text, str) and re.match(r"[A-Za-z][A-Za-z0-9+.\-]*://", text) is not None


def path_or_url(text: Path | str) -> Path | str:
    """Return a URL as it is, and a path as one."""
    return text if isinstance(text, str) and is_url(text) else Path(text)


def holds_secret(value: object) -> bool:
    """Return whether a URL, or one in tables and arrays, holds a user, a password or a signature."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(holds_secret, value.values() if isinstance(value, Mapping) else value))
    return is_url(value) and str(value) != without_secrets(str(value))


def without_secrets(text: str) -> str:
    return _SIGNATURE.sub(r"\1?...", _USER.sub("://...@", text))


def path_below(folder: Path, name: str) -> Path:
    """Return the path of a file that a store names; raise StorageError if it is outside of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise StorageError(f"a store names {name!r}, outside of its folder; give the URL of one that is to be trusted")
    return folder / path


class Store:
    """The files below a URL, by their names under it (``folder/name``). All methods block.

    Raises:
        ConfigError: the URL cannot be used, or the package of its protocol is missing.
        StorageError: by any method: there is no such bucket, it refuses, cannot be reached, or does not answer in time.
        FileNotFoundError: by :meth:`read` and :meth:`get`: there is no such file.
    """

    def __init__(self, url: str, *, key: str = "") -> None:
        self.url = url.rstrip("/")
        self._files, self._root = _opened(self.url, key=key)

    def names(self) -> list[str]:
        """Return the names of all files, in their order; an absent folder has none."""
        with suppress(FileNotFoundError):
            found = _ask(self.url, partial(self._files.find, self._root))
            return sorted(path.removeprefix(self._root).strip("/") for path in found)
        return []

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        content: bytes = _ask(f"{self.url}/{name}", partial(self._files.cat_file, f"{self._root}/{name}"))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; readers see all of it or nothing."""
        path = f"{self._root}/{name}"

        def write() -> None:
            if "file" not in self._files.protocol:
                self._files.pipe_file(path, content)
                return
            partial_path = f"{path}.{secrets.token_hex(4)}.partial"
            self._files.pipe_file(partial_path, content)
            self._files.mv(partial_path, path)

        _ask(f"{self.url}/{name}", write, writes=True)

    def put(self, files: Mapping[str, Path]) -> None:
        """Copy local files to their names, one after the other."""
        for name, path in files.items():
            put = partial(self._files.put_file, str(path), f"{self._root}/{name}")
            _ask(f"{self.url}/{name}", put, size_bytes=path.stat().st_size, writes=True)

    def get(self, name: str, path: Path, *, size_bytes: int) -> None:
        """Copy ``name``, of this size, to a local file; make its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        get = partial(self._files.get_file, f"{self._root}/{name}", str(path))
        _ask(f"{self.url}/{name}", get, size_bytes=size_bytes)

    def remove(self, name: str) -> None:
        """Delete a file, or all files of a folder in no particular order; an absent one is none."""
        with suppress(FileNotFoundError):
            _ask(f"{self.url}/{name}", partial(self._files.rm, f"{self._root}/{name}", recursive=True))


def local_copy(url: str, *, key: str = "", weights: bool = True) -> Path:
    """Return a path on this machine's disk for the file, the folder or the pattern with ``*`` at a URL.

    Files, without those of ``weights`` if they are not needed, are fetched into ``ASYNCRL_CACHE``
    (``~/.cache/asyncrl``), and again once their size, date or ETag has changed. A pattern becomes one of local paths.

    Raises:
        ConfigError: the URL cannot be used, or nothing is there.
        StorageError: it cannot be read, or changes meanwhile.
    """
    files, root = _opened(url.rstrip("/"), key=key)
    place = _without_query(root)

    def find() -> dict[str, Mapping[str, Any]]:
        if has_magic(place):
            return files.glob(root, detail=True)  # type: ignore[no-any-return]
        info = files.info(root)
        return {root: info} if info["type"] == "file" else files.find(root, detail=True)

    def listed() -> dict[str, Mapping[str, Any]]:
        with suppress(FileNotFoundError):
            return {
                # A web server may redirect to a URL that is signed anew each time: it says nothing of the file.
                path: {name: value for name, value in info.items() if name != "url"}
                for path, info in _ask(url, find).items()
                if info["type"] == "file" and (weights or not _without_query(path).endswith(_WEIGHTS))
            }
        return {}

    found = listed()
    if not found:
        raise ConfigError(f"{key or 'URL'} = {url!r}: there is nothing", path=key, remedy="check the URL")
    parts = place.split("/")
    pattern = next((number for number, part in enumerate(parts) if has_magic(part)), None)
    base = "/".join(parts[:pattern])
    name = parts[-1] if pattern is None else ""
    if pattern is None and place != root and "." not in name:
        name = root.rpartition("/")[2]  # the query names the file
    state = sorted((path, sorted(map(str, info.items()))) for path, info in found.items())
    folder = _cache() / xxhash.xxh3_128_hexdigest(f"{url} {state}".encode())
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder.with_suffix(".lock"), "a", opener=partial(os.open, mode=0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with DurableFiles().replacing(folder, sealed=False) as fetched:
                (fetched / _ORIGIN).write_text(url)
                for path, info in found.items():
                    below = _without_query(path).removeprefix(base).lstrip("/")
                    copy = path_below(fetched, f"{name}/{below}".strip("/"))
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    size_bytes = info.get("size")
                    with suppress(FileNotFoundError):
                        _ask(url, partial(files.get_file, path, str(copy)), size_bytes=size_bytes or 0)
                    if not copy.exists() or size_bytes not in (None, copy.stat().st_size):
                        raise StorageError(f"{url}: {path} changed while it was read; try again")
                if listed() != found:
                    raise StorageError(f"{url}: its files changed while they were read; try again")
    return folder / (name or place.removeprefix(base).lstrip("/"))


def origin(path: str) -> str:
    """Return the URL whose local copy a path is, or the path."""
    note = Path(path).parent / _ORIGIN
    return note.read_text() if note.is_file() and note.parent.parent == _cache() else path


def local_model(model: str, *, weights: bool = True) -> str:
    """Return what engines load for a model: the folder of a URL's files, the hub's name of ``hf://owner/name``.

    Without ``weights`` it is what a tokenizer and a check of the configuration need.

    Raises as :func:`local_copy`; a ConfigError also if the URL has no ``config.json``, as before the end of an export.
    """
    if not is_url(model):
        return model
    name = model.removeprefix("hf://").rstrip("/")
    if name != model.rstrip("/") and "@" not in name and name.count("/") <= 1:
        return name
    folder = local_copy(model, key="model", weights=weights)
    if not (folder / "config.json").is_file():
        remedy = "give the URL of a model, as `asyncrl export` writes it"
        raise ConfigError(f"model = {model!r} has no config.json; {remedy}", path="model", remedy=remedy)
    return str(folder)


def publish_folder(folder: Path, url: str, *, last: str) -> None:
    """Copy the files of a folder, without folders in it, to a URL where nothing is; ``last`` makes them whole.

    ``hf://owner/name`` is a repository of the hub, which is made, private, if need be, and gets one commit; weights of
    other names that it has are removed.

    Raises:
        ConfigError: the URL cannot be used, or something is there.
        StorageError: it cannot be written.
    """
    files = sorted((each for each in folder.iterdir() if each.is_file()), key=lambda each: each.name == last)
    if url.startswith("hf://"):
        push = partial(_push, files, *url.removeprefix("hf://").rstrip("/").partition("@")[::2])
        _ask(url, push, size_bytes=sum(each.stat().st_size for each in files), writes=True)
        return
    store = Store(url, key="--out")
    if store.names():
        raise ConfigError(f"--out = {url!r} exists", path="--out", remedy="give a URL where nothing is yet")
    store.put({path.name: path for path in files})


def _push(files: list[Path], repository: str, revision: str) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, exist_ok=True, private=True)
    api.upload_folder(
        repo_id=repository,
        folder_path=files[0].parent,
        revision=revision or None,
        allow_patterns=[each.name for each in files],
        delete_patterns=["*.safetensors", "*.bin", "*.index.json", "adapter_config.json"],  # of what was there
        commit_message="Weights of asyncrl export",
    )


# ----------------------------------------------------------------------------------------------------------- internals


def _opened(url: str, *, key: str) -> tuple[Any, str]:
    """Return the file system of a URL (Any: a vendor's) and the path in it."""
    import fsspec

    # Listings are never cached: other processes write as well.
    options: dict[str, Any] = {"use_listings_cache": False}
    if url.startswith(("file:", "local:")):
        options = {"auto_mkdir": True}
    elif url.startswith(_WEB):
        from aiohttp import ClientTimeout

        # Its own limit would be five minutes for a file of any size.
        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=30, sock_read=_timeout_s())}
    what, remedy = "holds a user, a password or a signature", "leave them to the environment of the process"
    if not holds_secret(url):
        try:
            files, root = fsspec.core.url_to_fs(url, **options)
            return files, str(root).rstrip("/")
        except (ImportError, ValueError) as error:
            what, remedy = "cannot be opened", str(error)
            if isinstance(error, ImportError) and (package := _package(url)):
                what, remedy = f"needs the package {package}", f"install it: {install_command(package)}"
    raise ConfigError(f"{key or 'URL'} = {without_secrets(url)!r} {what}; {remedy}", path=key, remedy=remedy)


def _package(url: str) -> str:
    """Return the package that reads the protocol of a URL, "" if fsspec knows none."""
    from fsspec.registry import known_implementations

    known = known_implementations.get(urlsplit(url).scheme, {"class": ""})
    return str(known["class"]).partition(".")[0].removeprefix("fsspec")


def _ask(url: str, call: Callable[[], _T], *, size_bytes: int = 0, writes: bool = False) -> _T:
    """Return what a store answers in time; a call that hangs is left to a thread which ends with the process.

    Raises:
        FileNotFoundError: a file that is to be read is absent.
        StorageError: whatever else the store, its package or the network answers.
    """
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001  whatever it is, it is raised where the answer is awaited
            answer.set_exception(error)

    timeout_s = _timeout_s() + size_bytes / 1e6
    threading.Thread(target=run, name="a call of a store", daemon=True).start()
    try:
        if not wait([answer], timeout_s).done:
            raise TimeoutError(f"no answer for {timeout_s:.0f} s (ASYNCRL_STORE_TIMEOUT_S)")
        return answer.result()
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not writes and not _is_missing_bucket(error):
            raise
        known = _CREDENTIALS.get(_package(url), "")
        if isinstance(error, FileNotFoundError):
            what, remedy = "there is no such bucket", "make it, or check its name"
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            what, remedy = "a disk cannot be written", "free space on it, or name another (ASYNCRL_CACHE, TMPDIR, runs)"
        elif isinstance(error, PermissionError):
            what, remedy = "access is refused", f"check the credentials{known} and what they allow"
        else:
            what, remedy = "it cannot be used", f"check the connection and the credentials{known}"
        reason = without_secrets((str(error).splitlines() or [""])[0])
        raise StorageError(f"{without_secrets(url)}: {what} ({type(error).__name__}: {reason}); {remedy}") from error


def _timeout_s() -> float:
    return float(os.environ.get("ASYNCRL_STORE_TIMEOUT_S", "300"))


def _without_query(path: str) -> str:
    """Return the address of a web server without what follows a '?', which elsewhere stands for any letter."""
    return path.partition("?")[0] if path.startswith(_WEB) else path


def _is_missing_bucket(error: BaseException | None) -> bool:
    """Return whether an absent file is absent since its bucket is, by the answer of the store that is its cause."""
    if error is None or "NoSuchBucket" in str(getattr(error, "response", "")) or "bucket does not exist" in str(error):
        return error is not None
    return _is_missing_bucket(error.__cause__ or error.__context__)


def _cache() -> Path:
    return Path(os.environ.get("ASYNCRL_CACHE") or Path.home() / ".cache" / "asyncrl")
