"""Pure maths of training: advantages, losses, divergences. Tensors in, tensors out; no model, no rank, no state."""

from asyncrl.algorithms.advantages import (
    AdvantageEstimator,
    best_of_group_advantages,
    dr_grpo_advantages,
    gae,
    gae_advantages,
    gigpo_advantages,
    grpo_advantages,
    load_estimator,
    online_dpo_advantages,
    opo_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
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
from asyncrl.algorithms.kl_reward import (
    AdaptiveKL,
    FixedKL,
    KLController,
    penalised_rewards,
    penalised_token_rewards,
    row_divergences,
)
from asyncrl.algorithms.kto import AnswerLosses, KTOObjective
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
from asyncrl.algorithms.reward_model import ComparisonLosses, bradley_terry_losses
from asyncrl.algorithms.supervised import supervised_token_losses
from asyncrl.algorithms.token_losses import TokenLosses
from asyncrl.algorithms.values import ValueObjective, value_token_losses

__all__ = [
    "CISPO",
    "DAPO",
    "GMPO",
    "GSPO",
    "M2PO",
    "PPO",
    "SAPO",
    "TOPR",
    "AdaptiveKL",
    "AdvantageEstimator",
    "Aggregation",
    "Anchor",
    "AnswerLosses",
    "ClipCov",
    "ComparisonLosses",
    "Correction",
    "FixedKL",
    "IcePop",
    "KLController",
    "KLCov",
    "KLEstimator",
    "KTOObjective",
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
    "ValueObjective",
    "anchor_log_probs",
    "answer_log_probs",
    "best_of_group_advantages",
    "bradley_terry_losses",
    "dr_grpo_advantages",
    "gae",
    "gae_advantages",
    "gigpo_advantages",
    "grpo_advantages",
    "kl_estimate",
    "load_estimator",
    "log_probs_and_entropy",
    "online_dpo_advantages",
    "opo_advantages",
    "pass_at_k_advantages",
    "penalised_rewards",
    "penalised_token_rewards",
    "preference_pairs",
    "probability_ratio",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "rloo_advantages",
    "row_divergences",
    "supervised_token_losses",
    "token_weights",
    "value_token_losses",
]
