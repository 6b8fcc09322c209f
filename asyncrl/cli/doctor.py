"""``asyncrl doctor``: what this machine has, what is missing, and the command that brings it."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from asyncrl import __version__
from asyncrl.engine_venv.recipe import Device
from asyncrl.engine_venv.venv import EngineVenv
from asyncrl.errors import ConfigError
from asyncrl.parts import PART_GROUPS, install_command, load_part, part_names

from .engine import GROUP, default_folder, recipe_of
from .failure import FAILED
from .output import show

__all__ = ["Check", "doctor"]

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108  the file system itself, not a file in it
NEEDED_PARTS = {
    "asyncrl.rollout_engines": {"transformers"},
    "asyncrl.training_engines": {"fsdp"},
    "asyncrl.weight_transports": {"shared_memory"},
    "asyncrl.replay_buffers": {"replay"},
}
"""What the defaults of the configuration name: without these nothing trains."""

MARKS = {"ok": "ok  ", "warning": "note", "missing": "FAIL"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. ``missing`` means that ``asyncrl train`` cannot run, ``warning`` worth knowing."""

    name: str
    status: Literal["ok", "warning", "missing"]
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A line of the package's metadata: ``torch>=2.7``, perhaps for an extra, perhaps for some systems only."""

    package: str
    needed: str
    extra: str
    here: bool

    @classmethod
    def parse(cls, text: str) -> Requirement:
        specification, _, marker = text.partition(";")
        match = re.match(r"\s*([\w.\-]+)(\[[^\]]*\])?\s*\(?([^)]*)", specification)
        assert match is not None, text
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        other_system = re.search(r"sys_platform\s*!=\s*['\"]([^'\"]+)['\"]", marker)
        here = other_system is None or other_system[1] != sys.platform
        return cls(match[1], match[3].strip(), extra[1] if extra else "", here)

    def met_by(self, installed: str) -> bool:
        """Whether a version lies in the range; of pre-releases and local parts only the release counts."""
        for operator, wanted in re.findall(r"(>=|<=|==|!=|>|<)\s*([\w.]+)", self.needed):
            have, want = _release(installed), _release(wanted)
            width = max(len(have), len(want))
            have, want = have + (0,) * (width - len(have)), want + (0,) * (width - len(want))
            holds = {
                ">=": have >= want,
                "<=": have <= want,
                "==": have == want,
                "!=": have != want,
                ">": have > want,
                "<": have < want,
            }[operator]
            if not holds:
                return False
        return True


def doctor(*, as_json: bool = False) -> int:
    """Look at everything and print it; 0 if ``asyncrl train`` can run here, else 1."""
    checks = list(examine())
    able = all(check.status != "missing" for check in checks)
    if as_json:
        show(json.dumps({"ok": able, "checks": [asdict(check) for check in checks]}, indent=2))
        return 0 if able else FAILED
    width = max(len(check.name) for check in checks)
    for check in checks:
        show(f"{MARKS[check.status]}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            show(f"      {'':<{width}}  -> {check.remedy}")
    show("\nasyncrl train can run here." if able else "\nasyncrl train cannot run here: see the lines marked FAIL.")
    return 0 if able else FAILED


def examine() -> Iterator[Check]:
    """All checks, from the machine up to the parts."""
    yield from _machine()
    yield from _dependencies()
    yield from _torch()
    yield from _ray()
    yield from _parts()
    yield from engine_venvs(Path())


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
        yield Check("memory", "warning", f"{memory / GIB:.1f} GiB", "Ray and torch want 4 GiB or more")
    else:
        yield Check("memory", "ok", f"{memory / GIB:.1f} GiB")
    if not Path(SHM).is_dir():
        yield Check(SHM, "warning", "none", "weights go through /tmp instead, more slowly")
        return
    usage = shutil.disk_usage(SHM)
    text = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if usage.free < GIB:
        remedy = (
            "two versions of the weights and Ray's objects lie there: docker run --shm-size=8g, or remount it larger"
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
    for line in lines:
        requirement = Requirement.parse(line)
        if requirement.extra == "dev" or not requirement.here:
            continue
        needed = f"needs {requirement.needed}" if requirement.needed else ""
        failing: Literal["warning", "missing"] = "warning" if requirement.extra else "missing"
        note = f" (extra {requirement.extra})" if requirement.extra else ""
        command = install_command(requirement.package)
        try:
            installed = version(requirement.package)
        except PackageNotFoundError:
            yield Check(requirement.package, failing, f"not installed, {needed}{note}", command)
            continue
        if requirement.met_by(installed):
            yield Check(requirement.package, "ok", f"{installed}, {needed}{note}")
        else:
            yield Check(requirement.package, failing, f"{installed}, {needed}{note}", command)


def _torch() -> Iterator[Check]:
    torch, problem = _import("torch")
    if torch is None:
        yield Check("torch build", "missing", problem, install_command("torch"))
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        names = ", ".join(f"{device.name} ({device.total_memory / GIB:.0f} GiB)" for device in devices)
        asking = "a run asks for its share with --trainer.num-gpus and --rollout.num-gpus"
        yield Check("torch build", "ok", f"{torch.__version__}, {built}; {names}; {asking}")
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


def _parts() -> Iterator[Check]:
    for group, noun in PART_GROUPS.items():
        needed = NEEDED_PARTS.get(group, set())
        names = part_names(group)
        for name in sorted(needed - set(names)):
            remedy = f"{sys.executable} -m pip install -e {Path(__file__).parents[2]}"
            yield Check(f"{noun} {name}", "missing", "not registered", remedy)
        for name in names:
            try:
                part = load_part(group, name)
            except ConfigError as error:
                status: Literal["warning", "missing"] = "missing" if name in needed else "warning"
                yield Check(f"{noun} {name}", status, str(error.__cause__ or error), error.remedy)
            except Exception as error:  # noqa: BLE001  a stranger's module may raise anything while it is imported
                status = "missing" if name in needed else "warning"
                yield Check(f"{noun} {name}", status, f"{type(error).__name__}: {error}", "see its own documentation")
            else:
                yield Check(f"{noun} {name}", "ok", f"{part.__module__}:{part.__qualname__}")


def engine_venvs(folder: Path) -> Iterator[Check]:
    """The environments of engines that lie in ``folder``, looked at without running them."""
    for engine in part_names(GROUP):
        venv = EngineVenv(folder / default_folder(engine))
        if not venv.folder.exists():
            continue
        name, state = f"environment {venv.folder.name}", venv.state()
        device: Device = "gpu" if state is None else state.device
        remedy = f"asyncrl engine install {engine} --{device} --path {venv.folder}"
        try:
            status = venv.examine(recipe_of(engine, device))
        except ConfigError as error:
            yield Check(name, "warning", str(error), error.remedy)
            continue
        if status.problems:
            yield Check(name, "warning", "; ".join(status.problems), remedy)
        else:
            found = ", ".join(f"{each} {version}" for each, version in status.found.items())
            yield Check(name, "ok", f"{found} (for {device})")


def available_cores() -> float:
    """Cores this process may use: its affinity, or a container's quota where that is less."""
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


def _release(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)
