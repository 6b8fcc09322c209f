"""What vLLM says of its scheduler after each step."""

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

__all__ = ["SchedulerMeter"]

_LONGEST_STEP_S = 60.0


class SchedulerMeter(StatLoggerBase):
    """Keeps the newest figures, and counts steps and the seconds in which something ran.

    Made by vLLM; :meth:`factory` gives it one to make.
    """

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.kv_cache_usage = 0.0
        self.decode_steps = 0
        self.busy_s = 0.0
        self._last_s: float | None = None

    def factory(self, vllm_config: Any, engine_index: int = 0) -> SchedulerMeter:
        """This one. Any: vLLM's configuration."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """A step ended. Any: vLLM calls them unstable."""
        now = time.monotonic()
        if scheduler_stats is None:
            return
        self.kv_cache_usage = float(scheduler_stats.kv_cache_usage)
        self.decode_steps += 1
        if self._last_s is not None:
            self.busy_s += min(now - self._last_s, _LONGEST_STEP_S)
        self._last_s = now if scheduler_stats.num_running_reqs else None

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
