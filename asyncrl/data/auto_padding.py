"""DataProtoConfig: one switch for batches that may be cut unequally, of verl's name."""

from __future__ import annotations

import os

from asyncrl.errors import SchemaError

__all__ = ["DataProtoConfig"]


class _Switch(type):
    _on = False

    @property
    def auto_padding(cls) -> bool:
        """Whether :meth:`DataProto.chunk` may cut every batch of this process into unequal chunks.

        Set here, or by the environment: ``VERL_AUTO_PADDING`` is ``true`` or ``1``.
        """
        return cls._on or os.environ.get("VERL_AUTO_PADDING", "").lower() in ("true", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  programs without types
            raise SchemaError(f"auto_padding is True or False, got {enabled!r}")
        cls._on = enabled


class DataProtoConfig(metaclass=_Switch):
    """``DataProtoConfig.auto_padding = True`` lets ``chunk`` cut any batch unequally, in the whole process.

    For programs written for verl. ``DataProto.from_dict(..., auto_padding=True)`` says it of one batch, and changes
    nobody else's; calls of worker groups need neither.

        >>> DataProtoConfig.auto_padding = True
        >>> [len(part) for part in data.chunk(2)]
        [2, 1]
        >>> DataProtoConfig.auto_padding = False

    Raises:
        SchemaError: the switch is set to anything but True or False.
    """
