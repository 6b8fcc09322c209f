"""Which versions of the weights a publisher holds: they grow, and no more than so many are held."""

from __future__ import annotations

from typing import Generic, TypeVar

from asyncrl.errors import WeightError, WeightVersionError

__all__ = ["HeldVersions"]

_T = TypeVar("_T")


class HeldVersions(Generic[_T]):
    """Versions by number, oldest first, each with what its bytes lie in. Not for several threads at a time.

    >>> held = HeldVersions(max_versions=1)
    >>> held.check(3)
    >>> held.add(3, "a file")
    >>> held.numbers
    (3,)
    >>> held.remove(3), held.remove(3)
    ('a file', None)
    """

    def __init__(self, *, max_versions: int) -> None:
        if max_versions < 1:
            raise ValueError(f"max_versions must be at least 1, got {max_versions}")
        self.max_versions = max_versions
        self._held: dict[int, _T] = {}
        self._last = -1
        self._closed = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """The versions held."""
        return tuple(self._held)

    @property
    def all(self) -> tuple[_T, ...]:
        """What they lie in."""
        return tuple(self._held.values())

    def check(self, version: int) -> None:
        """Whether ``version`` may be published now.

        Raises:
            WeightVersionError: it is not newer than the last one published.
            WeightError: as many as may be are held already, or nothing is published any more.
        """
        if self._closed:
            raise WeightError(f"version {version} cannot be published: the transport is closed")
        if version <= self._last:
            raise WeightVersionError(f"versions only grow: {version} cannot be published after {self._last}")
        if len(self._held) >= self.max_versions:
            raise WeightError(
                f"version {version} cannot be published: {self.max_versions} versions are held "
                f"({', '.join(map(str, self._held))}); release one first"
            )

    def add(self, version: int, lies_in: _T) -> None:
        """``version`` was published."""
        self._held[version] = lies_in
        self._last = version

    def remove(self, version: int) -> _T | None:
        """``version`` is not held any more; what it lay in, if it was."""
        return self._held.pop(version, None)

    def close(self) -> tuple[_T, ...]:
        """Nothing is published any more; what the versions that were held lie in."""
        left = self.all
        self._held.clear()
        self._closed = True
        return left
