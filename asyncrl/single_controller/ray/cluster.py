"""A Ray cluster for as long as a run needs it: an existing one, or one started on this machine.

Ray is imported only inside functions: it reads the variables that :class:`RayCluster` sets when it is imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

from asyncrl.errors import InfrastructureError, ResourceError
from asyncrl.runtime import in_abandonable_thread
from asyncrl.single_controller.liveness import Liveness, Silence

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# ruff: noqa: SLF001  Ray has no public way to ask its head for life, or to end its daemons at once


_log = logging.getLogger(__name__)
_T = TypeVar("_T")

PATIENCE = Liveness(every_s=2.0, named_after_s=6.0, ended_after_s=12.0)
"""When a head that does not answer is named, and given up."""
CLOSED_WITHIN_S = 11.0
"""How long a program may take to close after its head was given up. Ray would abort it after 60 s, unexplained."""

_head_is_lost = threading.Event()


def is_head_lost() -> bool:
    """Return whether the head of this process's cluster was given up: what needs it would wait for ever."""
    return _head_is_lost.is_set()


async def in_ray_thread(function: Callable[[], _T]) -> _T:
    """Run a function that asks Ray's head, in a thread that is left behind once the head is given up.

    A thread of asyncio's own would be waited for at the end of the program, for as long as Ray waits for its head.
    """
    return await in_abandonable_thread(function, hopeless=is_head_lost)


def node_address() -> str:
    """Return the address of this node in the cluster of this process; without one, the loopback address."""
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"


class RayCluster:
    """``with RayCluster(...):`` connects to Ray, and shuts down what it started.

    A cluster started here serves only clients with a random token, kept in this process's ``RAY_AUTH_TOKEN``; a program
    that imported Ray earlier has its own settings for that. A program that has called ``ray.init`` itself keeps its
    connection: then this does nothing.

    Args:
        address: cluster to join (``auto``, ``host:port``, ``ray://host:port``); None takes ``RAY_ADDRESS``, and without
            it, as ``local``, starts one on this machine, reachable only from this machine, whatever others run on it.
        num_cpus: logical CPUs of a cluster started here: a limit for what actors request, not cores they are bound to.
        log_folder: gets a link to the logs of Ray's processes.
        on_lost: called in a thread of its own, once, with the error that names a head (GCS) that does not answer.
            The process ends with status 1 if this is not closed within 11 s of that. None: the log alone names it.

    Raises:
        ResourceError: the cluster cannot be reached or started.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        num_cpus: float | None = None,
        log_folder: Path,
        on_lost: Callable[[InfrastructureError], object] | None = None,
    ) -> None:
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._address = None if address == "local" else address
        self._num_cpus = num_cpus
        self._log_folder = log_folder
        self._connected = False
        self._on_lost = on_lost
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        if self._address is None:
            _require_token()
        import ray

        if ray.is_initialized():
            return self
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address is None:
            options |= {"address": "local", "num_cpus": self._num_cpus, "include_dashboard": False}
        else:
            options["address"] = self._address
        try:
            with _keeping_signal_handlers(), _in_another_process_group(self._address is None):
                context: Any = ray.init(**options)
        except Exception as error:  # a daemon that dies meanwhile is a bare Exception of Ray's
            what = "started here" if self._address is None else f"reached at {self._address}"
            raise ResourceError(f"no Ray cluster could be {what}: {error}") from error
        self._connected = True
        self._link_logs(Path(str(context.address_info.get("session_dir") or "")))
        _head_is_lost.clear()
        self._closed.clear()
        gcs = getattr(_ray_worker().global_worker, "gcs_client", None)
        if gcs is not None:  # Ray Client has none
            threading.Thread(target=self._watch_head, args=(gcs,), name="asyncrl-ray-head", daemon=True).start()
        return self

    @property
    def address(self) -> str:
        """HOST:PORT, where other machines join the cluster."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def __exit__(self, *_: object) -> None:
        if self._connected:
            import ray

            self._connected = False
            if not is_head_lost():
                self._closed.set()  # nothing asks it from now on
            elif self._address is None:
                _kill_daemons()
            ray.shutdown()  # may hang without a head: the process is still watched then
            self._closed.set()

    def _watch_head(self, gcs: Any) -> None:
        """Ask the head for life until this is closed or the head is given up."""
        import ray.exceptions

        what = f"Ray's head (GCS at {self.address})"
        silence, named, reason = Silence(PATIENCE), False, ""
        while not self._closed.wait(PATIENCE.every_s):
            silence.sent(0, now_s=time.monotonic())
            try:
                gcs.internal_kv_get(b"asyncrl", None, timeout=PATIENCE.every_s)
                silence.answered(0)
            except ray.exceptions.RayError as error:
                reason = str(error)
            if self._closed.is_set():
                return
            silent_s = silence.silent(now_s=time.monotonic()).get(0)
            if (silent_s is not None) != named:
                named = not named
                _log.warning("%s %s", what, f"does not answer: {reason}" if named else "answers again")
            if self._on_lost is not None and [*silence.overdue(now_s=time.monotonic())]:
                _head_is_lost.set()
                lost = InfrastructureError(
                    f"{what} has not answered for {silent_s:.0f} s: its process died or is stopped, or its machine "
                    "cannot be reached. Its own log is gcs_server.out in logs/ray; what has a checkpoint can be resumed"
                )
                _log.error("%s", lost)
                self._on_lost(lost)
                if not self._closed.wait(CLOSED_WITHIN_S):  # a call of Ray's blocks it, and cannot be interrupted
                    if self._address is None:
                        _kill_daemons()
                    sys.stderr.write(f"error: {lost}\n")
                    sys.stderr.flush()
                    os._exit(1)
                return

    def _link_logs(self, session: Path) -> None:
        """Replace the link of the run's earlier process, whose session may be gone; whatever else is there stays."""
        link = self._log_folder / "ray"
        if not session.is_absolute():
            return
        try:
            if link.is_symlink():
                link.unlink()
            link.symlink_to(session / "logs", target_is_directory=True)
        except OSError as error:  # of a file system without links, for example: the run goes on without this one
            _log.warning("Ray's logs in %s have no link at %s: %s", session / "logs", link, error.strerror)


def _ray_worker() -> Any:
    return import_module("ray._private.worker")


def _kill_daemons() -> None:
    """Kill Ray's processes of this machine at once, since Ray's own ways to end them wait for the head."""
    psutil: Any = import_module("psutil")  # Ray brings it
    node: Any = _ray_worker()._global_node  # None once Ray has begun to shut down
    started = node.all_processes.values() if node is not None else ()
    for daemon in (each.process.pid for infos in started for each in infos):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(daemon)
            for each in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def _require_token() -> None:
    """Make Ray's services require a token: they listen on every interface and run what they are sent.

    Ray reads these variables when it is imported, and never again.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run on one machine sends nothing out
    if "ray" in sys.modules:
        return
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextmanager
def _in_another_process_group(wanted: bool) -> Generator[None, None, None]:
    """Have what is started inside belong to another process group, so that a signal to this one's reaches it not.

    ``timeout``, Slurm and Kubernetes signal whole groups. Ray's daemons would end at once, and the run, which saves and
    closes in order, would wait for them until Ray aborts it. They still end with this process, however it ends. A
    session leader has to stay in its group; nothing is done then.
    """
    before = os.getpgrp()
    if not wanted or os.getsid(0) == os.getpid():
        yield
        return
    # A group is named by a process of it: this child, which lives until the daemons are members.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0) as holder:  # noqa: S607  of every system
        os.setpgid(0, holder.pid)
        try:
            yield
        finally:
            os.setpgid(0, before)


@contextmanager
def _keeping_signal_handlers() -> Generator[None, None, None]:
    """Restore the signal handlers: Ray's start sets one that aborts the process at SIGTERM, before any cleanup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
