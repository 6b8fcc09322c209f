"""What the environment of an engine consists of. Data only: nothing here runs anything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Device", "EngineRecipe", "LocalDistribution", "PipInstall", "RecipeFactory", "Step"]

Device: TypeAlias = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDistribution:
    """A small distribution that is written here instead of fetched.

    It stands in for one that other packages ask for and that this machine cannot use (a GPU build that crashes on
    import), or gives a package the name that others look up.

    Attributes:
        name: of the distribution.
        version: that others are satisfied with.
        summary: why it is there; told by ``pip show``.
        modules: source by path within ``site-packages`` (``sgl_kernel/__init__.py``); none for an empty one.
    """

    name: str
    version: str
    summary: str
    modules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipInstall:
    """One call of pip.

    Attributes:
        requirements: as on pip's command line.
        dependencies: whether pip fetches what they need.
        indexes: package indexes besides pip's own that the vendor names.
    """

    requirements: tuple[str, ...]
    dependencies: bool = True
    indexes: tuple[str, ...] = ()


Step: TypeAlias = LocalDistribution | PipInstall


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """How to make the environment of one engine for one kind of device, and how to see that it is whole.

    Attributes:
        engine: entry-point name of the rollout engine.
        device: what it computes on.
        source: where the vendor documents the installation, or what the recipe was measured on.
        oldest_python: first minor version that every wheel exists for.
        newest_python: last one.
        size_bytes: what it takes on the disk, with room for pip's own work.
        steps: in order; each can be repeated.
        distributions: what has to be installed at which version.
        environment: variables that its interpreter runs with.
        probe: program that ends with status 0 where the engine can be imported and used.
    """

    engine: str
    device: Device
    source: str
    oldest_python: tuple[int, int]
    newest_python: tuple[int, int]
    size_bytes: int
    steps: tuple[Step, ...]
    distributions: Mapping[str, str]
    probe: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Stands for everything the recipe says: another one means that an environment is to be made again."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]


RecipeFactory: TypeAlias = Callable[[Device], EngineRecipe]
"""What an entry point of ``asyncrl.engine_recipes`` names. Raises ConfigError where there is none for a device."""
