"""Writes the wheel of a :class:`~asyncrl.engine_venv.recipe.LocalDistribution`: no build backend, no package index.

The format is the packaging specification "Binary distribution format": a zip with the modules, and ``METADATA``,
``WHEEL`` and ``RECORD`` (sha256 of every file) in a folder ``NAME-VERSION.dist-info``.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from asyncrl.engine_venv.recipe import LocalDistribution

__all__ = ["write_wheel"]

_WHEEL = "Wheel-Version: 1.0\nGenerator: asyncrl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment a zip knows: the same distribution gives the same bytes


def write_wheel(distribution: LocalDistribution, folder: Path) -> Path:
    """Write it into ``folder``; returns the file."""
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
