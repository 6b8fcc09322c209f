"""Virtual environments for engines: recipes, their installation with pip, and their examination.

    new -> installing -> complete
             ^  |
             '--'   interrupted or failed: the same command continues, since every step can be repeated

A state file in the environment prevents that an incomplete one is taken for a complete one.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

import asyncrl
from asyncrl.errors import ConfigError, InfrastructureError, ResourceError

Device: TypeAlias = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDistribution:
    """A small distribution that :func:`write_wheel` generates.

    It replaces one that other packages require and that this machine cannot use (a GPU build that crashes on import),
    or gives a package the name that others look up.

    ``version`` is one that other packages accept, ``modules`` has the sources by their paths within ``site-packages``.
    """

    name: str
    version: str
    summary: str
    modules: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name} {self.version} ({self.summary})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipInstall:
    """One call of pip, with or without dependencies; ``indexes`` are the vendor's, besides the configured ones."""

    requirements: tuple[str, ...]
    dependencies: bool = True
    indexes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        first, *others = self.requirements
        return f"{first} and {len(others)} more" if others else first


Step: TypeAlias = LocalDistribution | PipInstall


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """How to install one engine for one kind of device, and how to check the result.

    Attributes:
        engine: entry-point name of the rollout engine.
        source: the vendor's documentation of the installation, or the machine that the recipe was measured on.
        min_python, max_python: first and last minor version that every wheel exists for.
        size_bytes: required disk space, including pip's temporary files.
        steps: in order; each can be repeated.
        distributions: expected versions by name.
        environment: variables of the interpreter.
        probe: program that exits with status 0 if the engine can be imported and used.
    """

    engine: str
    device: Device
    source: str
    min_python: tuple[int, int]
    max_python: tuple[int, int]
    size_bytes: int
    steps: tuple[Step, ...]
    distributions: Mapping[str, str]
    probe: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hash of the recipe; an environment of another digest must be installed again."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]


_WHEEL = "Wheel-Version: 1.0\nGenerator: asyncrl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time of a zip: the same distribution gives the same bytes


def write_wheel(distribution: LocalDistribution, folder: Path) -> Path:
    """Write the distribution's wheel into ``folder``, without a build backend, and return its path.

    The format is the packaging specification "Binary distribution format": a zip with the modules, and ``METADATA``,
    ``WHEEL`` and ``RECORD`` (sha256 of every file) in a folder ``NAME-VERSION.dist-info``.
    """
    name = re.sub(r"[-_.]+", "_", distribution.name)
    stem = f"{name}-{distribution.version}"
    metadata = (
        f"Metadata-Version: 2.1\nName: {distribution.name}\nVersion: {distribution.version}\n"
        f"Summary: {distribution.summary}\n"
    )
    files = {
        **distribution.modules,
        f"{stem}.dist-info/METADATA": metadata,
        f"{stem}.dist-info/WHEEL": _WHEEL,
    }
    record = f"{stem}.dist-info/RECORD"
    lines = [f"{path},{_digest(text)},{len(text.encode())}" for path, text in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""])
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path, _EPOCH), text)
    return wheel


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


_UNREACHABLE = re.compile(
    r"Failed to establish a new connection|Temporary failure in name resolution|Name or service not known|"
    r"ConnectTimeoutError|NewConnectionError|ProxyError|SSLError|CERTIFICATE_VERIFY_FAILED|Connection refused|"
    r"ReadTimeoutError|Max retries exceeded|Network is unreachable"
)
_MISSING = re.compile(r"No matching distribution found for (\S+)")
_WRONG_PYTHON = re.compile(
    r"requires a different Python|Ignored the following versions that require a different python"
)
_CONFLICT = re.compile(r"ResolutionImpossible|conflicting dependencies")
_LINES = 6


def failure_of(output: str, *, what: str, log: str) -> InfrastructureError | ConfigError:
    """Return the error for the ``output`` of pip, which failed to install ``what``; ``log`` has the full output."""
    begin = f"{what} could not be installed: "
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return ResourceError(
            f"{begin}the disk is full; free some space (pip also writes to TMPDIR and its cache), and run the command "
            f"again: it continues where it stopped"
        )
    if re.search(r"Permission denied|Read-only file system", output):
        return ResourceError(f"{begin}the folder or pip's cache is not writable. See {log}")
    if _UNREACHABLE.search(output):
        return InfrastructureError(
            f"{begin}the package index cannot be reached; give one with --index-url (or PIP_INDEX_URL, PIP_PROXY, "
            f"PIP_CERT), and run the command again: it continues where it stopped. See {log}"
        )
    if (missing := _MISSING.search(output)) is not None:
        reason = (
            "for this version of Python; give another with --python, and --recreate"
            if _WRONG_PYTHON.search(output)
            else "for this machine and Python; a mirror may lack it: give another with --extra-index-url"
        )
        return InfrastructureError(f"{begin}no configured package index has {missing[1]} {reason}. See {log}")
    if _CONFLICT.search(output):
        return InfrastructureError(f"{begin}the current packages of the index conflict. See {log}")
    last = "\n".join(f"  {line}" for line in output.strip().splitlines()[-_LINES:])
    return InfrastructureError(f"{begin}the end of pip's output in {log}:\n{last}")


_STATE_FILE = "asyncrl-engine.json"
_LOG_FILE = "asyncrl-engine.log"
_LOCK_FILE = "asyncrl-engine.lock"
_DELETED = ".deleted"
_OURS = ("asyncrl", "engines")
_ROOT = Path(asyncrl.__file__).parents[1]
_PROBE_S = 300.0
_GIB = 1 << 30


class VenvState(msgspec.Struct, frozen=True, kw_only=True):
    """The state file: engine, device and digest of the recipe, and whether all steps and the probe succeeded."""

    engine: str
    device: Device
    digest: str
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VenvStatus:
    """The result of an examination.

    Attributes:
        state: None if the environment was not made by this command.
        found: installed versions of the recipe's distributions, by name.
        problems: a sentence for each problem; empty for a complete environment.
    """

    folder: Path
    state: VenvState | None
    found: dict[str, str]
    problems: tuple[str, ...]


class EngineVenv:
    """The environment in ``folder``, which does not have to exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        """File with the output of all installation commands."""
        return self.folder / _LOG_FILE

    def state(self) -> VenvState | None:
        """Read the state file; return None if it is missing or unreadable."""
        try:
            return msgspec.json.decode((self.folder / _STATE_FILE).read_bytes(), type=VenvState)
        except (OSError, msgspec.MsgspecError):
            return None

    def examine(self, recipe: EngineRecipe) -> VenvStatus:
        """Compare the environment with the recipe without running its code."""
        state, found = self.state(), self._distributions()
        problems: list[str] = []
        if state is None:
            problems.append("it was not made by `asyncrl engine install`")
        elif not state.complete:
            problems.append("it is incomplete: an installation was interrupted or failed")
        elif state.digest != recipe.digest:
            problems.append(f"it was made by an older recipe of {recipe.engine} for {recipe.device}")
        if not os.access(self.python, os.X_OK):
            problems.append(f"its interpreter {self.python} is missing or a broken link")
        for name, wanted in recipe.distributions.items():
            have = found.get(_normal(name))
            if have is None:
                problems.append(f"{name} is not installed")
            elif have != wanted and have.partition("+")[0] != wanted:
                problems.append(f"{name} is {have}, the recipe requires {wanted}")
        problems += [
            f"{name} is not linked to {_ROOT / name}"
            for name in _OURS
            if (self._packages() / name).resolve() != (_ROOT / name).resolve()
        ]
        known = {name: found[_normal(name)] for name in recipe.distributions if _normal(name) in found}
        return VenvStatus(folder=self.folder, state=state, found=known, problems=tuple(problems))

    def probe(self, recipe: EngineRecipe) -> None:
        """Import the engine and asyncrl in the environment; raise InfrastructureError with the output if that fails."""
        environment = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            done = subprocess.run(  # noqa: S603 - the environment's interpreter
                [str(self.python), "-c", recipe.probe],
                capture_output=True,
                text=True,
                check=False,
                timeout=_PROBE_S,
                env={**environment, **recipe.environment},
                cwd=self.folder,
            )
        except subprocess.TimeoutExpired:
            raise InfrastructureError(
                f"importing {recipe.engine} in {self.folder} took longer than {_PROBE_S:g} s"
            ) from None
        except OSError as error:
            raise InfrastructureError(f"{self.python} cannot be started: {error.strerror}") from error
        if done.returncode != 0:
            last = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-6:])
            raise InfrastructureError(f"{recipe.engine} cannot be imported in {self.folder}:\n{last}")

    def _packages(self) -> Path:
        return next(iter(sorted((self.folder / "lib").glob("python3.*/site-packages"))), self.folder / "lib")

    def _distributions(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in distributions(path=[str(self._packages())]):
            metadata = each.metadata
            if metadata and "Name" in metadata and "Version" in metadata:  # else pip was interrupted as it wrote them
                found[_normal(metadata["Name"])] = metadata["Version"]
        return found

    def install(
        self,
        recipe: EngineRecipe,
        *,
        python: Path | None,
        pip_options: Sequence[str],
        recreate: bool,
        log_step: Callable[[str], None],
    ) -> VenvStatus:
        """Install the recipe, or continue an incomplete installation, or check a complete one. Blocks for minutes.

        ``python`` makes a new environment, by default this process's; ``pip_options`` are further options of ``pip
        install``, such as ``--index-url``; ``recreate`` deletes an existing environment first; ``log_step`` receives a
        line for each step.

        Raises:
            ConfigError: the folder holds something else, or an environment of another Python than the given one; or the
                version of Python does not fit.
            ResourceError: the disk is full.
            InfrastructureError: pip or the probe failed.
        """
        version = _check_python(python or Path(sys.executable), recipe)
        self._check_folder(recipe, recreate=recreate)
        made = [each.name for each in (self.folder / "lib").glob("python3.*")]
        if python is not None and not recreate and made and f"python{version}" not in made:
            raise ConfigError(
                f"{self.folder} has {made[0]}, and {python} is {version}", path="--python", remedy="add --recreate"
            )
        with self._locked():
            shutil.rmtree(self.folder / _DELETED, ignore_errors=True)  # of a --recreate that was interrupted
            if recreate:
                self._clear()
            status = self.examine(recipe)
            if not status.problems:
                self.probe(recipe)
                log_step(f"{self.folder} is already complete")
                return status
            if self.state() is None:
                self._check_free_space(recipe)
            else:
                log_step(f"continuing with {self.folder}: {status.problems[0]}")
            self._write_state(recipe, complete=False)
            self._create_venv(python or Path(sys.executable), log_step)
            for number, step in enumerate(recipe.steps, 1):
                log_step(f"{number}/{len(recipe.steps)} {step.label}")
                self._install_step(step, pip_options)
            self._link_asyncrl()
            log_step(f"importing {recipe.engine}")
            self.probe(recipe)
            self._write_state(recipe, complete=True)
            status = self.examine(recipe)
            if status.problems:
                self._write_state(recipe, complete=False)
                raise InfrastructureError(f"{self.folder} was installed, but {'; '.join(status.problems)}")
            return status

    def _check_folder(self, recipe: EngineRecipe, *, recreate: bool) -> None:
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} exists but is not a directory", path="--path", remedy="name another path")
        state = self.state()
        if state is None and folder.is_dir() and any(path.name != _LOCK_FILE for path in folder.iterdir()):
            raise ConfigError(
                f"{folder} exists and was not made by this command",
                path="--path",
                remedy="name another path with --path, or remove it",
            )
        if state is not None and (state.engine, state.device) != (recipe.engine, recipe.device) and not recreate:
            raise ConfigError(
                f"{folder} is the environment of {state.engine} for {state.device}",
                path="--path",
                remedy="name another path with --path, or delete it with --recreate",
            )

    def _check_free_space(self, recipe: EngineRecipe) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < recipe.size_bytes:
            raise ResourceError(
                f"{recipe.engine} needs {recipe.size_bytes / _GIB:.0f} GiB, and {free / _GIB:.1f} GiB are free on the "
                f"disk of {self.folder}; free some space, or name another path with --path"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / _LOCK_FILE).open("w")
        except OSError as error:
            raise ConfigError(f"{self.folder} is not writable: {error.strerror}", path="--path") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"{self.folder} is being installed by another process", path="--path") from None
            yield

    def _clear(self) -> None:
        """Delete the environment, its state last: interrupted, it is one that lacks whole folders."""
        (self.folder / _DELETED).mkdir(exist_ok=True)
        for path in list(self.folder.iterdir()):
            if path.name not in (_LOCK_FILE, _STATE_FILE, _DELETED):
                path.rename(self.folder / _DELETED / path.name)
        shutil.rmtree(self.folder / _DELETED)
        (self.folder / _STATE_FILE).unlink(missing_ok=True)

    def _write_state(self, recipe: EngineRecipe, *, complete: bool) -> None:
        state = VenvState(engine=recipe.engine, device=recipe.device, digest=recipe.digest, complete=complete)
        new = self.folder / f"{_STATE_FILE}.new"
        new.write_bytes(msgspec.json.encode(state))
        new.replace(self.folder / _STATE_FILE)

    def _create_venv(self, python: Path, log_step: Callable[[str], None]) -> None:
        if self._has_pip():
            return
        log_step(f"creating a virtual environment with {python}")
        output, status = self._run([str(python), "-m", "venv", str(self.folder)])
        if status != 0 or not self._has_pip():
            raise InfrastructureError(
                f"{python} cannot create virtual environments; its package venv may be missing "
                f"(Debian: apt install python3-venv):\n{output.strip()[-400:]}"
            )

    def _has_pip(self) -> bool:
        if not os.access(self.python, os.X_OK):
            return False
        command = [str(self.python), "-I", "-c", "import pip"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603 - likewise

    def _install_step(self, step: Step, pip_options: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="asyncrl-wheel-") as folder:
            if isinstance(step, PipInstall):
                arguments = [*step.requirements, *pip_options]
                arguments += [f"--extra-index-url={url}" for url in step.indexes]
                arguments += [] if step.dependencies else ["--no-deps"]
            else:
                arguments = ["--no-deps", "--no-index", "--force-reinstall", str(write_wheel(step, Path(folder)))]
            command = [str(self.python), "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
            output, status = self._run([*command, "--progress-bar=off", *arguments])
        if status != 0:
            raise failure_of(output, what=step.label, log=str(self.log))

    def _run(self, command: Sequence[str]) -> tuple[str, int]:
        """Run a command with its output appended to the log; return that output and the exit status."""
        with self.log.open("a+", encoding="utf-8", errors="replace") as log:
            log.write(re.sub(r"://[^/\s]*@", "://****@", f"$ {' '.join(command)}\n"))  # as pip writes a URL with a key
            log.flush()
            begin = log.tell()
            try:
                done = subprocess.run(  # noqa: S603 - the user's interpreter, or one made from it
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False
                )
            except OSError as error:
                raise ConfigError(f"{command[0]} cannot be started: {error.strerror}", path="--python") from error
            log.seek(begin)
            return log.read(), done.returncode

    def _link_asyncrl(self) -> None:
        """Link the packages of this process into the environment, and nothing that lies beside them."""
        for name in _OURS:
            link = self._packages() / name
            if link.is_symlink():
                link.unlink()
            elif link.exists():
                raise InfrastructureError(f"{link} already exists: another package has a module {name!r}")
            link.symlink_to(_ROOT / name, target_is_directory=True)


def _check_python(python: Path, recipe: EngineRecipe) -> str:
    """Return the minor version, as in ``3.12``; raise ConfigError unless the recipe can use it."""
    program = "import json, sys; print(json.dumps([*sys.version_info[:2], sys.platform]))"
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter that the user named
            [str(python), "-I", "-c", program], capture_output=True, text=True, check=True, timeout=60
        )
        major, minor, system = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"{python} is not a working Python: {error}", path="--python", remedy="name an interpreter"
        ) from error
    if system != "linux":
        raise ConfigError(f"the environments of engines are for Linux, not {system}", path="engine")
    if not recipe.min_python <= (major, minor) <= recipe.max_python:
        oldest, newest = (".".join(map(str, version)) for version in (recipe.min_python, recipe.max_python))
        raise ConfigError(
            f"{recipe.engine} has wheels for Python {oldest} to {newest}, and {python} is {major}.{minor}",
            path="--python",
            remedy="name another interpreter with --python",
        )
    return f"{major}.{minor}"


def _normal(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()
