"""The first step of a run, where the truth is known: fresh samples of the same weights.

Before anything was learned, trainer and engine hold the same weights, and the update starts from them: the ratio is 1,
and the log-probs that the engine reported are those the trainer computes, up to rounding. If they are not, one of the
two computes something else (another temperature, another template, a token shifted, weights that did not arrive), and
everything after would be trained on a lie that no later metric shows as clearly.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.errors import EngineError

__all__ = ["MISMATCH_LIMITS", "check_first_step"]

MISMATCH_LIMITS = {"float32": 1e-5, "bfloat16": 0.02}
"""Mean k3 KL per token, in nats, that rounding may explain, by the type the model computes in.

Two float32 programs of one model were measured to differ by 1e-13 here; a temperature that is off by a tenth gives 3e-4
on a model of random weights, and more on one that is sure of something. In bfloat16 the same two programs differ by
1.5e-5 on a small model; engines of another make, on large ones, by up to some thousandths.
"""


def check_first_step(metrics: Mapping[str, float], *, limit: float, one_step: bool) -> None:
    """Hold the metrics of the first update against what they must be.

    Only tokens that the current weights sampled are asked, and nothing where there are none.

    Args:
        metrics: of the first update after the engines got its weights.
        limit: highest mean k3 estimate of KL(engine || trainer), in nats per token.
        one_step: True if the update was one optimizer step, so that nothing had moved when the ratio was taken.

    Raises:
        EngineError: they are not; the message says what to look at.
    """
    mismatch = metrics.get("behaviour_kl_age_0")
    if mismatch is not None and not mismatch <= limit:
        raise EngineError(
            f"trainer and rollout engine disagree about tokens of the very same weights: k3 KL {mismatch:.3g} nats per "
            f"token, at most {limit:g} can be rounding. Look at rollout.temperature, top_p and top_k, at the engine's "
            "dtype and quantisation, and at the chat template; algorithm.mismatch_limit sets another limit"
        )
    drift = metrics.get("policy_kl", 0.0)
    if one_step and not abs(drift) <= limit:
        raise EngineError(
            f"the first optimizer step did not start from the proximal weights: KL {drift:.3g} nats per token instead "
            "of 0"
        )
