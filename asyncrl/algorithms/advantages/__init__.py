"""From rewards to advantages. Each estimator is found by its name in the entry-point group ``asyncrl.advantages``."""

from asyncrl.algorithms.advantages.estimator import AdvantageEstimator, load_estimator
from asyncrl.algorithms.advantages.gae import gae, gae_advantages
from asyncrl.algorithms.advantages.gigpo import gigpo_advantages
from asyncrl.algorithms.advantages.group_relative import (
    dr_grpo_advantages,
    grpo_advantages,
    opo_advantages,
    rloo_advantages,
)
from asyncrl.algorithms.advantages.online_dpo import online_dpo_advantages
from asyncrl.algorithms.advantages.pass_at_k import best_of_group_advantages, pass_at_k_advantages
from asyncrl.algorithms.advantages.reinforce import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
)

__all__ = [
    "AdvantageEstimator",
    "best_of_group_advantages",
    "dr_grpo_advantages",
    "gae",
    "gae_advantages",
    "gigpo_advantages",
    "grpo_advantages",
    "load_estimator",
    "online_dpo_advantages",
    "opo_advantages",
    "pass_at_k_advantages",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "rloo_advantages",
]
