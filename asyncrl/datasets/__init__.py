"""Rows for training: where they come from, what a row is, and which one comes next.

    files, folders, the hub --source--> records --rows--> prompts, conversations, preferences
                                                             |
                             order, mixture (pure)  --stream--'--> row number 0, 1, 2, ... without an end

A stream is a function of its index and a seed: the row a resumed run asks for is the one it would have got.
"""

from __future__ import annotations

from .dataset import Dataset
from .mixture import Draw, Mixture
from .opening import SourceConfig, open_conversations, open_dataset, open_preferences, open_prompts
from .order import Order
from .rows import Conversation, Preference, PromptRow, read_conversation, read_preference, read_prompt
from .source import Record, RowSource, open_sources
from .stream import Part, Stream

__all__ = [
    "Conversation",
    "Dataset",
    "Draw",
    "Mixture",
    "Order",
    "Part",
    "Preference",
    "PromptRow",
    "Record",
    "RowSource",
    "SourceConfig",
    "Stream",
    "open_conversations",
    "open_dataset",
    "open_preferences",
    "open_prompts",
    "open_sources",
    "read_conversation",
    "read_preference",
    "read_prompt",
]
