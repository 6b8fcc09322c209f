"""Conversations that a client continues by the id of their last response (``previous_response_id``)."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict

from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import Limits


class Conversations:
    """Keeps of each key's holder the conversations (JSON) that were used last, as many as ``limits`` allow."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: defaultdict[str, OrderedDict[str, bytes]] = defaultdict(OrderedDict)
        self._size_bytes: Counter[str] = Counter()

    def add(self, holder: str, response_id: str, content: bytes) -> None:
        """Keep a conversation, the answer included; those that are not used for longest make room."""
        kept = self._kept[holder]
        self._size_bytes[holder] += len(content) - len(kept.pop(response_id, b""))
        kept[response_id] = content
        while (
            len(kept) > self._limits.conversations_per_key
            or self._size_bytes[holder] > self._limits.conversation_bytes_per_key
        ):
            _, dropped = kept.popitem(last=False)
            self._size_bytes[holder] -= len(dropped)

    def find(self, holder: str, response_id: str) -> bytes:
        """Return the conversation up to a response and with it; an API error if this holder has none of that id."""
        kept = self._kept[holder]
        if response_id not in kept:
            raise APIError(
                400,
                f"no response {response_id[:100]!r} is kept: it was made with store=false, with another key, or too "
                "long ago; send the whole conversation",
                code="previous_response_not_found",
            )
        kept.move_to_end(response_id)
        return kept[response_id]
