"""What the first step is held to: fresh samples of the same weights are told apart from anything else."""

from __future__ import annotations

import math

import pytest

from asyncrl.errors import EngineError
from asyncrl.trainer.assembly import MISMATCH_LIMITS
from asyncrl.trainer.learner import check_first_step


def test_rounding_is_let_through() -> None:
    check_first_step({"behaviour_kl_staleness_0": 1e-12, "policy_kl": -1e-9}, limit=1e-4, one_step=True)
    check_first_step({"behaviour_kl_staleness_0": 1e-4, "policy_kl": 1e-4}, limit=1e-4, one_step=True)


@pytest.mark.parametrize("mismatch", [1.1e-4, math.nan, math.inf])
def test_two_programs_that_disagree_are_named(mismatch: float) -> None:
    with pytest.raises(EngineError, match="trainer and rollout engine disagree about tokens of the very same weights"):
        check_first_step({"behaviour_kl_staleness_0": mismatch}, limit=1e-4, one_step=True)


def test_only_fresh_tokens_are_asked() -> None:
    check_first_step({"behaviour_kl": 1.0, "behaviour_kl_staleness_1": 1.0}, limit=1e-4, one_step=True)


@pytest.mark.parametrize("drift", [2e-4, -2e-4, math.nan])
def test_a_step_that_did_not_start_where_it_should_is_named(drift: float) -> None:
    with pytest.raises(EngineError, match="did not start from the proximal weights"):
        check_first_step({"policy_kl": drift}, limit=1e-4, one_step=True)
    check_first_step({"policy_kl": drift}, limit=1e-4, one_step=False)


def test_every_type_a_model_computes_in_has_its_limit() -> None:
    assert set(MISMATCH_LIMITS) == {"float32", "bfloat16"}
    assert MISMATCH_LIMITS["float32"] < MISMATCH_LIMITS["bfloat16"]
