"""The GPUs of this machine, divided among the replicas of a server."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence

from asyncrl.errors import ResourceError
from asyncrl.interfaces import DeviceShare


def visible_devices() -> list[str]:
    """Return the GPUs that this process sees, by their names in ``CUDA_VISIBLE_DEVICES``; CUDA is not initialised."""
    import torch

    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if named is None else map(str.strip, named.split(","))
    return list(names)[:count]


class ReplicaDevices:
    """Assigns each replica GPUs of its own, of those that are ``visible``; it keeps them for as long as it exists.

    A replica for which none are left has those that the fewest replicas have, if ``share`` allows that.

        >>> devices = ReplicaDevices(["4", "5", "6"], DeviceShare(count=1))
        >>> [devices.assign(name, ["a", "b"]) for name in ("a", "b", "a")]
        [(0,), (1,), (0,)]
        >>> devices.environment((1,))
        {'CUDA_VISIBLE_DEVICES': '5'}
    """

    def __init__(self, visible: Sequence[str], share: DeviceShare) -> None:
        self._visible = visible
        self._share = share
        size = share.count
        starts = range(0, len(visible) - size + 1, size) if size else ()
        self._parts = [tuple(range(start, start + size)) for start in starts]
        self._assigned: dict[str, tuple[int, ...]] = {}

    def assign(self, name: str, replicas: Collection[str]) -> tuple[int, ...]:
        """Return the indices of the GPUs of replica ``name``; ``replicas`` are those that exist, or are to be made.

        It is empty where no GPU is visible, or the engine's options name a device.

        Raises:
            ResourceError: there are too few.
        """
        self._assigned = {each: part for each, part in self._assigned.items() if each in replicas}
        if not self._share.count or not self._visible or name in self._assigned:
            return self._assigned.get(name, ())
        size, visible = self._share.count, len(self._visible)
        if not self._parts:
            raise ResourceError(
                f"a replica takes {size} GPUs, and {visible} can be seen: make more visible (CUDA_VISIBLE_DEVICES), or "
                "divide the model over fewer"
            )
        used = Counter(self._assigned.values())
        part = min(self._parts, key=lambda part: used[part])
        if used[part] and self._share.room:
            raise ResourceError(
                f"a replica takes {size} of {visible} visible GPUs and all of their memory, and none are left for "
                f"{name}: use at most {len(self._parts)} replicas here, or set {self._share.room}, and replicas share "
                "GPUs"
            )
        self._assigned[name] = part
        return part

    @property
    def shared(self) -> bool:
        """Whether several replicas have the same GPUs."""
        return len({*self._assigned.values()}) < len(self._assigned)

    def environment(self, part: Sequence[int]) -> dict[str, str]:
        """Return the variables of a process that sees only the GPUs with these indices."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._visible[index] for index in part)} if part else {}
