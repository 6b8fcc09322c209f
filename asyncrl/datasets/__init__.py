"""Rows for training: their sources, their kinds and their order.

    files, folders, the hub --source--> records --rows--> prompts, conversations, preferences
                                                             |
                             order, mixture (pure)  --stream--'--> rows 0, 1, 2, ... without end

A row of a stream depends only on its index and a seed, so a resumed run gets the rows of an uninterrupted one.
"""

from __future__ import annotations

from asyncrl.datasets.load import open_conversations, open_dataset, open_prompts
from asyncrl.datasets.rows import Preference, PromptRow, read_conversation, read_preference, read_prompt
from asyncrl.datasets.source import open_sources
from asyncrl.datasets.stream import Dataset, Mixture, Order, Stream

__all__ = [
    "Dataset",
    "Mixture",
    "Order",
    "Preference",
    "PromptRow",
    "Stream",
    "open_conversations",
    "open_dataset",
    "open_prompts",
    "open_sources",
    "read_conversation",
    "read_preference",
    "read_prompt",
]
