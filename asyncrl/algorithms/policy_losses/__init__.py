"""Policy losses, one paper a file. Each is found by its name in the entry-point group ``asyncrl.policy_losses``."""

from asyncrl.algorithms.policy_losses.cispo import CISPO
from asyncrl.algorithms.policy_losses.covariance import ClipCov, KLCov
from asyncrl.algorithms.policy_losses.gmpo import GMPO
from asyncrl.algorithms.policy_losses.gspo import GSPO
from asyncrl.algorithms.policy_losses.m2po import M2PO
from asyncrl.algorithms.policy_losses.ppo import DAPO, PPO
from asyncrl.algorithms.policy_losses.sapo import SAPO
from asyncrl.algorithms.policy_losses.topr import TOPR

__all__ = ["CISPO", "DAPO", "GMPO", "GSPO", "M2PO", "PPO", "SAPO", "TOPR", "ClipCov", "KLCov"]
