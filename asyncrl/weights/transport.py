"""The two ends of a weight transport find each other by a specification that travels to every process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.interfaces import WeightTransport
from asyncrl.parts import make_part

__all__ = ["TransportSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """What a transport is made from, on the publisher's side and on the pullers'; picklable.

    Attributes:
        name: entry point or dotted path.
        namespace: what keeps this run's weights apart from any other's.
        options: further keyword arguments, from ``[weights.options]``.
    """

    name: str
    namespace: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> WeightTransport:
        """One end of the transport."""
        transport: WeightTransport = make_part(
            "asyncrl.weight_transports",
            self.name,
            options=self.options,
            path="weights.transport",
            namespace=self.namespace,
        )
        return transport
