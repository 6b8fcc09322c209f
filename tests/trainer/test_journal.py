from dataclasses import asdict

import pytest

from asyncrl.errors import TokenBalanceError
from asyncrl.rollout.live_weights import WeightsProof
from asyncrl.trainer.journal import Journal


def test_every_token_has_one_fate():
    journal = Journal(trained=70)
    journal.drop_tokens("stale", 20)
    journal.drop_tokens("environment_failed", 0)
    balance = journal.balance(generated=100, in_flight=10)
    assert balance.difference == 0
    assert asdict(balance) == {"generated": 100, "trained": 70, "dropped": {"stale": 20}, "in_flight": 10}


def test_a_lost_and_a_doubled_token_both_show():
    journal = Journal(trained=5)
    assert journal.balance(generated=6, in_flight=0).difference == 1
    assert journal.balance(generated=4, in_flight=0).difference == -1
    journal.drop_tokens("interrupted", -2)
    with pytest.raises(TokenBalanceError, match=r"a count is below 0: 3 were generated, .* dropped: -2 interrupted"):
        journal.balance(generated=3, in_flight=0).check()


def test_checks_of_rewards_are_counted_once_and_their_failures_told(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    failed = {"KeyError in world.py:3 step": {"count": 2, "example": "Traceback: KeyError"}}
    for _ in range(2):
        journal.count_checks({"rows": 3, "failures": failed})
    assert journal.take_checks().items() >= {"rewards_checked": 6, "reward_checks_failed": 4}.items()
    assert not any(journal.take_checks().values())
    assert caplog.text.count("KeyError in world.py:3 step") == 1


def test_proofs_of_weights_are_counted_since_the_step_before() -> None:
    journal = Journal()
    journal.count_proofs([WeightsProof(seconds=0.25, canary=0.5), WeightsProof(seconds=0.5, canary=0.125)])
    found = {name: value for name, value in journal.take_checks().items() if name.startswith("weights")}
    assert found == {"weights_proofs": 2, "weights_proof_s": 0.5, "weights_canary": 0.5}
    assert not any(journal.take_checks().values())


def test_attempts_that_failed_with_their_sandboxes_are_counted_apart() -> None:
    journal = Journal()
    journal.count_failures(
        {
            "SandboxError in pool.py:9 lease": {"count": 2, "example": "Traceback: SandboxError"},
            "KeyError in world.py:3 step": {"count": 5, "example": "Traceback: KeyError"},
        }
    )
    assert journal.take_checks()["sandboxes_failed"] == 2
    assert journal.take_checks()["sandboxes_failed"] == 0
    assert sum(each["count"] for each in journal.failures.values()) == 7
