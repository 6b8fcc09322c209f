"""Keys: who is calling. Only their digests are kept, and they are compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from pathlib import Path

from asyncrl.errors import ConfigError

__all__ = ["KeyRing", "read_keys"]

_SHORTEST_KEY = 16
_LONGEST_KEY = 512


_COMMENT = re.compile(r"(?:^|\s)#")
_HOLDER_OR_KEY = re.compile(r"[^=\s]+=+[^=\s]")


class KeyRing:
    """The keys that open one plane, each with the name of its holder.

    Args:
        keys: key by holder's name.

    Raises:
        ConfigError: a key is shorter than 16 characters, longer than 512, or has a space in it.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        for holder, key in keys.items():
            if not _SHORTEST_KEY <= len(key) <= _LONGEST_KEY or not key.isascii() or any(map(str.isspace, key)):
                raise ConfigError(
                    f"the key of {holder!r} must have {_SHORTEST_KEY} to {_LONGEST_KEY} ASCII characters and no space",
                    path="api-key",
                    remedy="make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
                )
        self._digests = tuple((holder, _digest(key)) for holder, key in keys.items())

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(holder for holder, _ in self._digests)})"

    @classmethod
    def from_file(cls, path: Path) -> KeyRing:
        """The keys of a file; see :func:`read_keys`.

        Raises:
            ConfigError: likewise, or a key is too short or too long.
        """
        return cls(read_keys(path))

    @classmethod
    def from_environment(cls, name: str) -> KeyRing | None:
        """The key in an environment variable, held by ``environment``; None if it is not set."""
        key = os.environ.get(name, "")
        return cls({"environment": key}) if key else None

    def holder_of(self, presented: str) -> str | None:
        """Whose key this is, or None. Takes as long for a wrong key as for a right one."""
        found: str | None = None
        digest = _digest(presented[: _LONGEST_KEY + 1])
        for holder, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = holder
        return found


def read_keys(path: Path, *, option: str = "api-key-file") -> dict[str, str]:
    """One key a line, either alone or as ``holder = key``; ``#`` after white space begins a comment.

    Raises:
        ConfigError: the file cannot be read, has no key, names a holder twice, or has a line ``holder=key``, which may
            be a key as a whole.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", path=option, remedy="give a text file of keys") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = _COMMENT.split(line, maxsplit=1)[0].strip()
        if not text:
            continue
        holder, equals, key = text.partition(" = ")
        if not equals:
            if _HOLDER_OR_KEY.match(text):
                raise ConfigError(
                    f"{path}:{number}: a key with = in the middle",
                    path=option,
                    remedy="write holder = key, with spaces",
                )
            holder, key = f"key-{number}", text
        if holder.strip() in keys:
            raise ConfigError(f"{path}:{number}: {holder.strip()!r} has a key already", path=option)
        keys[holder.strip()] = key.strip()
    if not keys:
        raise ConfigError(f"{path}: no key in it", path=option, remedy="write one key a line")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
