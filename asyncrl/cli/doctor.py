"""``asyncrl doctor``: what this machine has, what is missing, and the command that installs it."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from asyncrl import __version__
from asyncrl.cli.output import FAILED, show, show_json
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.plugins import PART_GROUPS, install_command, load_part, part_names, part_path

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Status: TypeAlias = Literal["ok", "warning", "missing"]

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108  the file system itself, not a file in it
NEEDED_PARTS = {
    "asyncrl.rollout_engines": {"transformers"},
    "asyncrl.training_engines": {"fsdp"},
    "asyncrl.weight_transports": {"shared_memory"},
    "asyncrl.replay_buffers": {"replay"},
}
"""Parts that the defaults of the configuration name."""

MARKS = {"ok": "ok  ", "warning": "note", "missing": "FAIL"}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; with status ``missing`` ``asyncrl train`` cannot run."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def doctor_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """Print all checks; return 0 if ``asyncrl train`` can run here, else 1."""
    checks = list(examine())
    able = all(check.status != "missing" for check in checks)
    if namespace.json:
        show_json({"ok": able, "checks": checks})
        return 0 if able else FAILED
    width = max(len(check.name) for check in checks)
    for check in checks:
        show(f"{MARKS[check.status]}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            show(f"      {'':<{width}}  -> {check.remedy}")
    show("\nasyncrl train can run here." if able else "\nasyncrl train cannot run here: see the lines marked FAIL.")
    return 0 if able else FAILED


def examine() -> Iterator[Check]:
    """Yield all checks, from the machine up to the parts."""
    yield from _machine()
    yield from _dependencies()
    yield from _torch()
    yield from _ray()
    yield _sandbox()
    yield from _parts()
    for name in part_names("asyncrl.doctor_checks"):
        yield from (Check(*found) for found in load_part("asyncrl.doctor_checks", name)(Path()))


def _machine() -> Iterator[Check]:
    found = f"{platform.python_version()} ({sys.executable})"
    yield Check("python", "ok", found)
    yield Check("asyncrl", "ok", f"{__version__} ({Path(__file__).parents[1]})")
    yield Check("platform", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    cores = available_cores()
    if cores >= 2:
        yield Check("cores", "ok", f"{cores:g}")
    else:
        yield Check("cores", "warning", f"{cores:g}", "rollout and training overlap from two cores up")
    memory = _memory_bytes()
    if memory is None:
        yield Check("memory", "warning", "unknown")
    elif memory < 4 * GIB:
        yield Check("memory", "warning", f"{memory / GIB:.1f} GiB", "Ray and torch need 4 GiB or more")
    else:
        yield Check("memory", "ok", f"{memory / GIB:.1f} GiB")
    if not Path(SHM).is_dir():
        yield Check(SHM, "warning", "none", "weights go through /tmp instead, more slowly")
        return
    usage = shutil.disk_usage(SHM)
    text = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if usage.free < GIB:
        remedy = (
            "it holds two versions of the weights and Ray's objects: docker run --shm-size=8g, or remount it larger"
        )
        yield Check(SHM, "warning", text, remedy)
    else:
        yield Check(SHM, "ok", text)


def _dependencies() -> Iterator[Check]:
    try:
        lines = requires("asyncrl") or []
    except PackageNotFoundError:
        remedy = f"{sys.executable} -m pip install -e {Path(__file__).parents[2]}"
        yield Check("package metadata", "missing", "asyncrl is on the path but not installed: no parts by name", remedy)
        return
    from packaging.requirements import Requirement

    for requirement in map(Requirement, lines):
        extra = _extra_of(requirement)
        if extra is None or extra == "dev":
            continue
        needs = f", needs {requirement.specifier}" if requirement.specifier else ""
        note = needs + (f" (extra {extra})" if extra else "")
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = ""
        if installed and requirement.specifier.contains(installed, prereleases=True):
            yield Check(requirement.name, "ok", installed + note)
        else:
            status: Status = "warning" if extra else "missing"
            command = install_command(requirement.name)
            yield Check(requirement.name, status, (installed or "not installed") + note, command)


def _extra_of(requirement: Requirement) -> str | None:
    """Return the extra that brings a requirement, empty if every install does, None if none on this system does."""
    if requirement.marker is None:
        return ""
    extras = ["", *metadata("asyncrl").get_all("Provides-Extra", [])]
    return next((extra for extra in extras if requirement.marker.evaluate({"extra": extra})), None)


def _torch() -> Iterator[Check]:
    torch, problem = _import("torch")
    if torch is None:
        yield Check("torch build", "missing", problem, install_command("torch"))
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        names = ", ".join(f"{device.name} ({device.total_memory / GIB:.0f} GiB)" for device in devices)
        usage = "a run reserves them with --trainer.num-gpus and --rollout.num-gpus"
        yield Check("torch build", "ok", f"{torch.__version__}, {built}; {names}; {usage}")
    elif shutil.which("nvidia-smi"):
        remedy = (
            "install a CUDA build: https://pytorch.org/get-started/locally"
            if torch.version.cuda is None
            else "see `nvidia-smi`: the driver may be too old for this build"
        )
        yield Check("torch build", "warning", f"{torch.__version__}, {built}; the GPUs here are not usable", remedy)
    else:
        yield Check("torch build", "ok", f"{torch.__version__}, {built}; no GPU: use small models")


def _ray() -> Iterator[Check]:
    ray, problem = _import("ray")
    if ray is None:
        yield Check("ray cluster", "missing", problem, install_command("ray"))
        return
    address = os.environ.get("RAY_ADDRESS")
    where = f"joins {address} (RAY_ADDRESS)" if address else "a new one is started on this machine"
    yield Check("ray cluster", "ok", f"{ray.__version__}, {where}")


def _sandbox() -> Check:
    from asyncrl.sandboxes.contract import Isolation, SandboxLimits
    from asyncrl.sandboxes.namespaces import NamespacesBackend

    async def isolation() -> Isolation:
        sandbox = await NamespacesBackend().create(SandboxLimits())
        await sandbox.destroy()
        return sandbox.isolation

    name = "sandboxes"
    shared = "time, processor cores, and the kernel itself are shared"
    try:
        missing = asyncio.run(isolation()).missing
    except AsyncRLError as error:
        return Check(name, "warning", str(error), "programs of a policy cannot be run here (the rule code, sandbox)")
    if not missing:
        found = f"programs of a policy have a user, network, files and processes of their own; {shared}"
        return Check(name, "ok", found)
    found = f"programs of a policy get no {', '.join(missing)} of their own; {shared}"
    remedy = "allow user namespaces (kernel.unprivileged_userns_clone=1; in a container, a seccomp profile that does)"
    return Check(name, "warning", found, remedy)


def _parts() -> Iterator[Check]:
    for group, noun in PART_GROUPS.items():
        needed = NEEDED_PARTS.get(group, set())
        names = part_names(group)
        for name in sorted(needed - set(names)):
            remedy = f"{sys.executable} -m pip install -e {Path(__file__).parents[2]}"
            yield Check(f"{noun} {name}", "missing", "not registered", remedy)
        for name in names:
            status: Status = "missing" if name in needed else "warning"
            try:
                load_part(group, name)
            except ConfigError as error:
                yield Check(f"{noun} {name}", status, str(error.__cause__ or error), error.remedy)
            except Exception as error:  # noqa: BLE001  a third-party module may raise anything while it is imported
                yield Check(f"{noun} {name}", status, f"{type(error).__name__}: {error}", "see its own documentation")
            else:
                yield Check(f"{noun} {name}", "ok", part_path(group, name))


def available_cores() -> float:
    """Return the cores this process may use: its affinity, or a container's quota where that is less."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _first_line(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) / int(period))
    return cores


def _memory_bytes() -> int | None:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    limit = _first_line(Path("/sys/fs/cgroup/memory.max"))
    return min(memory, int(limit)) if limit.isdigit() else memory


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""


def _import(name: str) -> tuple[Any, str]:
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # noqa: BLE001  broken native libraries raise OSError, RuntimeError, ...
        return None, f"cannot be imported: {type(error).__name__}: {error}"
