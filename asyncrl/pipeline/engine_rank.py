"""A rank that holds an engine of its own: what the workers of trainer and critic have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from asyncrl.parts import make_part
from asyncrl.single_controller import Dispatch, Worker, register

__all__ = ["EngineRank"]


class _Engine(Protocol):
    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None: ...

    def close(self) -> None: ...


EngineT = TypeVar("EngineT", bound=_Engine)


class EngineRank(Worker, Generic[EngineT]):
    """Makes an engine by its name and keeps it. Derived workers say what it is made for.

    Collective methods are plain ``def``: they run one after another, in the order of the calls, on every rank.

    Args:
        group: entry-point group of the engine.
        name: its entry point or dotted path.
        options: keyword arguments of the engine that a user wrote.
        path: dotted key of the configuration that names the engine, for messages.
    """

    def __init__(self, group: str, name: str, *, options: Mapping[str, Any], path: str) -> None:
        super().__init__()
        self._group, self._name, self._options, self._path = group, name, options, path
        self._engine: EngineT | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, folder: Path) -> None:
        """Write everything training goes on from."""
        self._held().save(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, folder: Path) -> None:
        """Go on from what :meth:`save` wrote."""
        self._held().load(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder."""
        self._held().export(folder)

    def close(self) -> None:
        """Leave the process group and free the model."""
        self._close_engine()

    def _make_engine(self, model_path: str, settings: Mapping[str, Any]) -> None:
        """Make the engine for a model; one that was held is closed first."""
        self._close_engine()
        self._engine = make_part(
            self._group,
            self._name,
            model_path,
            options=self._options,
            path=self._path,
            rank=self.rank,
            world_size=self.world_size,
            master_addr=self.master_addr,
            master_port=self.master_port,
            **settings,
        )

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _held(self) -> EngineT:
        if self._engine is None:
            raise RuntimeError(f"{type(self).__name__} holds no model yet: call build(model_path, settings) first")
        return self._engine
