"""Reading models, one at a time in a process.

transformers' ``from_pretrained`` changes settings of the whole process while it runs (default dtype, device and
initialisation contexts): a second one in another thread gets wrong weights now and then, without a word. A rollout
engine and a trainer that share a process load at the same time, so they take turns here.
"""

from __future__ import annotations

import threading

__all__ = ["one_at_a_time"]

one_at_a_time = threading.Lock()
"""Hold it around everything that makes a transformers model."""
