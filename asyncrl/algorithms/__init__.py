"""Pure maths of training: advantages, losses, divergences. Tensors in, tensors out; no model, no rank, no state."""

from asyncrl.algorithms.advantages import (
    ADVANTAGES,
    Advantage,
    dr_grpo_advantages,
    get_advantage,
    grpo_advantages,
    register_advantage,
    rloo_advantages,
)
from asyncrl.algorithms.aggregation import Aggregation, token_weights
from asyncrl.algorithms.anchor import Anchor, anchor_log_probs
from asyncrl.algorithms.corrections import (
    Correction,
    IcePop,
    MaskedImportance,
    NoCorrection,
    Rejection,
    TruncatedImportance,
)
from asyncrl.algorithms.kl import KLEstimator, kl_estimate, probability_ratio
from asyncrl.algorithms.log_probs import log_probs_and_entropy
from asyncrl.algorithms.policy import PolicyObjective
from asyncrl.algorithms.policy_loss import PolicyLoss
from asyncrl.algorithms.policy_losses import (
    CISPO,
    DAPO,
    GMPO,
    GSPO,
    M2PO,
    PPO,
    SAPO,
    TOPR,
    ClipCov,
    KLCov,
)
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.preference import PairLosses, PreferenceObjective, answer_log_probs, preference_pairs
from asyncrl.algorithms.supervised import supervised_token_losses
from asyncrl.algorithms.token_losses import TokenLosses

__all__ = [
    "ADVANTAGES",
    "CISPO",
    "DAPO",
    "GMPO",
    "GSPO",
    "M2PO",
    "PPO",
    "SAPO",
    "TOPR",
    "Advantage",
    "Aggregation",
    "Anchor",
    "ClipCov",
    "Correction",
    "IcePop",
    "KLCov",
    "KLEstimator",
    "MaskedImportance",
    "NoCorrection",
    "PairLosses",
    "PolicyLoss",
    "PolicyObjective",
    "PolicyTokens",
    "PreferenceObjective",
    "Rejection",
    "TokenLosses",
    "TruncatedImportance",
    "anchor_log_probs",
    "answer_log_probs",
    "dr_grpo_advantages",
    "get_advantage",
    "grpo_advantages",
    "kl_estimate",
    "log_probs_and_entropy",
    "preference_pairs",
    "probability_ratio",
    "register_advantage",
    "rloo_advantages",
    "supervised_token_losses",
    "token_weights",
]
