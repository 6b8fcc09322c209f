"""A virtual environment made from a recipe: made, gone on with, examined.

    new -> making -> whole
             ^  |
             '--'   interrupted or failed: the same command goes on, since every step can be repeated

A file in the environment says how far it is, so a half-made one is never taken for a whole one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import msgspec

import asyncrl
from asyncrl.engine_venv.local_wheel import write_wheel
from asyncrl.engine_venv.pip_failure import failure_of
from asyncrl.engine_venv.recipe import Device, EngineRecipe, PipInstall, Step
from asyncrl.errors import ConfigError, InfrastructureError, ResourceError

__all__ = ["EngineVenv", "PackageIndexes", "VenvState", "VenvStatus"]

_STATE_FILE = "asyncrl-engine.json"
_LOG_FILE = "asyncrl-engine.log"
_LOCK_FILE = "asyncrl-engine.lock"
_OURS = ("asyncrl", "engines")
_ROOT = Path(asyncrl.__file__).parents[1]
_PROBE_S = 300.0
_GIB = 1 << 30


class VenvState(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment says of itself.

    Attributes:
        engine: of the recipe.
        device: of the recipe.
        digest: of the recipe.
        whole: whether every step was done and the probe succeeded.
    """

    engine: str
    device: Device
    digest: str
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageIndexes:
    """Where pip looks, beside what its own configuration says.

    Attributes:
        index: replaces pip's own; None leaves it.
        more: further ones.
    """

    index: str | None = None
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VenvStatus:
    """What an examination found.

    Attributes:
        folder: the environment.
        state: what it says of itself; None if it was not made by this command.
        found: distributions of the recipe that are installed, by name.
        problems: what is wrong, a sentence each; empty if nothing is.
    """

    folder: Path
    state: VenvState | None
    found: dict[str, str]
    problems: tuple[str, ...]


class EngineVenv:
    """The environment in ``folder``, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        """Everything that was printed while it was made."""
        return self.folder / _LOG_FILE

    def state(self) -> VenvState | None:
        """What it says of itself; None if it says nothing that can be read."""
        try:
            return msgspec.json.decode((self.folder / _STATE_FILE).read_bytes(), type=VenvState)
        except (OSError, msgspec.MsgspecError):
            return None

    # ---------------------------------------------------------------------------------------------------- examining

    def examine(self, recipe: EngineRecipe) -> VenvStatus:
        """Compare it with the recipe without running any of it."""
        state, found = self.state(), self._distributions()
        problems: list[str] = []
        if state is None:
            problems.append("it was not made by `asyncrl engine install`, or not even begun")
        elif not state.whole:
            problems.append("it is half-made: an installation was interrupted or failed")
        elif state.digest != recipe.digest:
            problems.append(f"it was made by another recipe than today's of {recipe.engine} for {recipe.device}")
        if not os.access(self.python, os.X_OK):
            problems.append(f"its interpreter {self.python} is missing or leads nowhere")
        for name, wanted in recipe.distributions.items():
            have = found.get(_normal(name))
            if have is None:
                problems.append(f"{name} is not installed")
            elif have != wanted and have.partition("+")[0] != wanted:
                problems.append(f"{name} is {have}, the recipe wants {wanted}")
        problems += [
            f"{name} is not {_ROOT / name}" for name in _OURS if not _leads_to(self._packages() / name, _ROOT / name)
        ]
        known = {name: found[_normal(name)] for name in recipe.distributions if _normal(name) in found}
        return VenvStatus(folder=self.folder, state=state, found=known, problems=tuple(problems))

    def probe(self, recipe: EngineRecipe) -> None:
        """Import the engine in it, and what asyncrl needs beside it.

        Raises:
            InfrastructureError: that failed; with the end of what it printed.
        """
        environment = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            done = subprocess.run(  # noqa: S603 - its own interpreter
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
                f"{recipe.engine} in {self.folder} was not imported within {_PROBE_S:g} s"
            ) from None
        except OSError as error:
            raise InfrastructureError(f"{self.python} cannot be started: {error.strerror}") from error
        if done.returncode != 0:
            last = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-6:])
            raise InfrastructureError(f"{recipe.engine} cannot be imported in {self.folder}:\n{last}")

    def _packages(self) -> Path:
        return next(iter(sorted((self.folder / "lib").glob("python3.*/site-packages"))), self.folder / "lib")

    def _distributions(self) -> dict[str, str]:
        return {_normal(each.name): each.version for each in distributions(path=[str(self._packages())])}

    # ------------------------------------------------------------------------------------------------------- making

    def install(
        self,
        recipe: EngineRecipe,
        *,
        python: Path,
        indexes: PackageIndexes,
        recreate: bool,
        tell: Callable[[str], None],
    ) -> VenvStatus:
        """Make it, or go on with one that is half-made, or see that it is whole. Blocks, for minutes.

        Args:
            recipe: what it is to consist of.
            python: interpreter it is made from.
            indexes: where pip looks.
            recreate: throw what is there away first.
            tell: gets a line for each step.

        Raises:
            ConfigError: the folder is something else, or Python's version does not fit.
            ResourceError: no room on the disk.
            InfrastructureError: pip or the probe failed; the message says why as far as it can be known.
        """
        _check_python(python, recipe)
        self._check_folder(recipe, recreate=recreate)
        with self._locked():
            if recreate:
                self._clear()
            status = self.examine(recipe)
            if not status.problems:
                self.probe(recipe)
                tell(f"{self.folder} is whole already")
                return status
            if self.state() is None:
                self._check_room(recipe)
            else:
                tell(f"going on with {self.folder}: {status.problems[0]}")
            self._write_state(recipe, whole=False)
            self._make_interpreter(python, tell)
            for number, step in enumerate(recipe.steps, 1):
                tell(f"{number}/{len(recipe.steps)} {_told(step)}")
                self._take(step, indexes)
            self._link()
            tell(f"importing {recipe.engine}")
            self.probe(recipe)
            self._write_state(recipe, whole=True)
            status = self.examine(recipe)
            if status.problems:
                self._write_state(recipe, whole=False)
                raise InfrastructureError(f"{self.folder} was made, but {'; '.join(status.problems)}")
            return status

    def _check_folder(self, recipe: EngineRecipe, *, recreate: bool) -> None:
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is there and is no folder", path="--path", remedy="name another")
        state = self.state()
        if state is None and folder.is_dir() and any(path.name != _LOCK_FILE for path in folder.iterdir()):
            raise ConfigError(
                f"{folder} is there and was not made by this command",
                path="--path",
                remedy="name another with --path, or remove it",
            )
        if state is not None and (state.engine, state.device) != (recipe.engine, recipe.device) and not recreate:
            raise ConfigError(
                f"{folder} is the environment of {state.engine} for {state.device}",
                path="--path",
                remedy="name another with --path, or give --recreate to throw it away",
            )

    def _check_room(self, recipe: EngineRecipe) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < recipe.size_bytes:
            raise ResourceError(
                f"{recipe.engine} needs {recipe.size_bytes / _GIB:.0f} GiB, and {free / _GIB:.1f} GiB are free where "
                f"{self.folder} lies; make room, or give another place with --path"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / _LOCK_FILE).open("w")
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written: {error.strerror}", path="--path") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"{self.folder} is being made by another process", path="--path") from None
            yield

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name == _LOCK_FILE:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _write_state(self, recipe: EngineRecipe, *, whole: bool) -> None:
        state = VenvState(engine=recipe.engine, device=recipe.device, digest=recipe.digest, whole=whole)
        new = self.folder / f"{_STATE_FILE}.new"
        new.write_bytes(msgspec.json.encode(state))
        new.replace(self.folder / _STATE_FILE)

    def _make_interpreter(self, python: Path, tell: Callable[[str], None]) -> None:
        if self._runs("import pip"):
            return
        tell(f"making an environment of {python}")
        output, status = self._run([str(python), "-m", "venv", str(self.folder)])
        if status != 0 or not self._runs("import pip"):
            raise InfrastructureError(
                f"{python} cannot make virtual environments; its package venv may be missing "
                f"(Debian: apt install python3-venv):\n{output.strip()[-400:]}"
            )

    def _runs(self, program: str) -> bool:
        if not os.access(self.python, os.X_OK):
            return False
        command = [str(self.python), "-I", "-c", program]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603 - likewise

    def _take(self, step: Step, indexes: PackageIndexes) -> None:
        with tempfile.TemporaryDirectory(prefix="asyncrl-wheel-") as made:
            if isinstance(step, PipInstall):
                words = list(step.requirements)
                words += [] if step.dependencies else ["--no-deps"]
                for url in (*step.indexes, *indexes.more):
                    words += ["--extra-index-url", url]
                words += [] if indexes.index is None else ["--index-url", indexes.index]
            else:
                words = ["--no-deps", "--no-index", "--force-reinstall", str(write_wheel(step, Path(made)))]
            command = [str(self.python), "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
            output, status = self._run([*command, "--progress-bar=off", *words])
        if status != 0:
            raise failure_of(output, what=_told(step), log=str(self.log))

    def _run(self, command: Sequence[str]) -> tuple[str, int]:
        """Run to its end, printing into the log; what it printed, and its status."""
        with self.log.open("a+", encoding="utf-8", errors="replace") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            begin = log.tell()
            try:
                done = subprocess.run(  # noqa: S603 - the interpreter that the user named, or made from it
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False
                )
            except OSError as error:
                raise ConfigError(f"{command[0]} cannot be started: {error.strerror}", path="--python") from error
            log.seek(begin)
            return log.read(), done.returncode

    def _link(self) -> None:
        """Make asyncrl importable there: the very files that run here, and nothing that lies beside them."""
        for name in _OURS:
            link = self._packages() / name
            if link.is_symlink():
                link.unlink()
            elif link.exists():
                raise InfrastructureError(f"{link} is in the way: another package brings a module {name!r}")
            link.symlink_to(_ROOT / name, target_is_directory=True)


def _check_python(python: Path, recipe: EngineRecipe) -> None:
    program = "import json, sys; print(json.dumps([*sys.version_info[:2], sys.platform]))"
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter that the user named
            [str(python), "-I", "-c", program], capture_output=True, text=True, check=True, timeout=60
        )
        major, minor, system = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"{python} is no Python that runs: {error}", path="--python", remedy="name an interpreter"
        ) from error
    if system != "linux":
        raise ConfigError(f"the environments of engines are for Linux, not {system}", path="engine")
    if not recipe.oldest_python <= (major, minor) <= recipe.newest_python:
        oldest, newest = (".".join(map(str, version)) for version in (recipe.oldest_python, recipe.newest_python))
        raise ConfigError(
            f"{recipe.engine} has wheels for Python {oldest} to {newest}, and {python} is {major}.{minor}",
            path="--python",
            remedy="name another interpreter with --python",
        )


def _told(step: Step) -> str:
    if isinstance(step, PipInstall):
        first, *others = step.requirements
        return f"{first} and {len(others)} more" if others else first
    return f"{step.name} {step.version} ({step.summary})"


def _leads_to(link: Path, target: Path) -> bool:
    return link.exists() and link.resolve() == target.resolve()


def _normal(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()
