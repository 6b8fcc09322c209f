"""What every test may rely on."""

from __future__ import annotations

import os
import signal

import pytest

# A shell starts what it runs in the background with SIGINT ignored, and so would every process that a test starts and
# interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray lowers the priority of its workers: whatever else a machine does would starve them past every deadline.
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_configure(config: pytest.Config) -> None:
    """Only GPU tests see a GPU: what chooses its device itself must give everywhere what it gives on a CPU."""
    asked = config.option.markexpr
    if "gpu" not in asked or "not gpu" in asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
