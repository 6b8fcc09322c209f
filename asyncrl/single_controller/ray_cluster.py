"""A Ray cluster for as long as a run needs it: joined where there is one, started on this machine otherwise."""

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from asyncrl.errors import ResourceError

__all__ = ["RayCluster", "node_address"]


def node_address() -> str:
    """The address of this node in the cluster that this process is in; of this machine for itself, if in none."""
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"


class RayCluster:
    """``with RayCluster(...):`` connects to Ray, and takes down again what it started.

    A cluster started here answers only to holders of a random token, kept in this process's ``RAY_AUTH_TOKEN``;
    a program that imported Ray earlier has its own settings for that.

    A program that has called ``ray.init`` itself keeps its connection: then this does nothing.

    Args:
        address: cluster to join (``auto``, ``host:port``, ``ray://host:port``); None starts one on this machine,
            reachable from this machine only.
        num_cpus: logical CPUs of a cluster started here. They are what actors ask for, not cores they are bound to.
        log_folder: gets a link to the logs of Ray's processes.

    Raises:
        ResourceError: the cluster cannot be reached or started.
    """

    def __init__(self, *, address: str | None = None, num_cpus: float | None = None, log_folder: Path) -> None:
        self._address = address
        self._num_cpus = num_cpus
        self._log_folder = log_folder
        self._owns = False

    def __enter__(self) -> Self:
        if self._address is None:
            _ask_for_a_token()
        import ray

        if ray.is_initialized():
            return self
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address is None:
            options |= {"num_cpus": self._num_cpus, "include_dashboard": False}
        else:
            options["address"] = self._address
        try:
            with _keeping_signal_handlers():
                context: Any = ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            what = "started here" if self._address is None else f"reached at {self._address}"
            raise ResourceError(f"no Ray cluster could be {what}: {error}") from error
        self._owns = True
        self._link_logs(Path(str(context.address_info.get("session_dir") or "")))
        return self

    @property
    def address(self) -> str:
        """Where other machines join it: HOST:PORT."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def __exit__(self, *_: object) -> None:
        if self._owns:
            import ray

            self._owns = False
            ray.shutdown()

    def _link_logs(self, session: Path) -> None:
        link = self._log_folder / "ray"
        if session.is_absolute() and not link.exists():
            link.symlink_to(session / "logs", target_is_directory=True)


def _ask_for_a_token() -> None:
    """Ray's services listen on every interface and run what they are sent: let them ask for a secret.

    Ray reads these variables when it is imported, and never again.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run on one machine talks to nobody
    if "ray" in sys.modules:
        return
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextmanager
def _keeping_signal_handlers() -> Generator[None, None, None]:
    """Ray's start puts a handler of its own in place that aborts the process at SIGTERM, before any cleanup."""
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
