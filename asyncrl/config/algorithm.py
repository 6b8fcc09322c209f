"""The maths of an update: an advantage, a loss, a correction, and the terms beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from .problem import Problem, raise_problems
from .section import PartName, Section, Table
from .toml import value_to_toml

if TYPE_CHECKING:
    from asyncrl.algorithms import AdvantageEstimator, KLController, PolicyObjective
    from asyncrl.algorithms.soundness import Objection

    from .config import Config

__all__ = ["AlgorithmConfig", "check_algorithm"]


class AlgorithmConfig(Section):
    """The maths of an update. `docs/algorithms.md` has the formulas, and what goes with what."""

    advantage: PartName = "grpo"
    """From rewards to advantages: an installed name, or `package.module:function`."""
    advantage_options: Table = Field(default_factory=dict)
    """Options of the advantage."""
    loss: PartName = "dapo"
    """Policy loss, from ratio and advantage to a token's loss: an installed name, or `package.module:Class`."""
    loss_options: Table = Field(default_factory=dict)
    """Options of the loss, like its clips."""
    anchor: Literal["proximal", "behaviour", "interpolated"] = "proximal"
    """Centre of the trust region: the weights at the start of the step, those that sampled, or between by age."""
    correction: PartName = "tis"
    """Weight of tokens that older weights or another engine sampled: an installed name, or `package.module:Class`."""
    correction_options: Table = Field(default_factory=dict)
    """Options of the correction, like its cap."""
    kl_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the divergence from the reference policy; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "low_variance"] = "k3"
    """Which per-token estimator; k3 is unbiased and never negative."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Where the divergence counts: as a term of the loss, or taken off every row's reward (k1 is enough there)."""
    kl_target: Annotated[float, Field(gt=0, le=100)] | None = None
    """Nats per token that a coefficient in the reward is steered to; none: the coefficient stays."""
    kl_horizon: Annotated[float, Field(gt=0, le=1e12)] = 10_000.0
    """Rows over which a steered coefficient can change by a fifth."""
    entropy_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """Token losses to one number: over all tokens, per row and then over rows, or by a constant length."""
    whiten: bool = False
    """Shift and scale the advantages of a batch to mean 0 and variance 1 over its tokens; usual with `gae`."""
    mismatch_limit: Annotated[float, Field(gt=0, le=100)] | None = None
    """Nats per token (k3 KL) that engine and trainer may differ by on the first step; none: by `model.dtype`."""
    allow_unsound: bool = False
    """Run combinations that are known to go wrong, to see it happen; they are told in the log instead of refused."""

    def objective(self, *, longest: int) -> PolicyObjective:
        """The objective; ``longest`` is the length that ``fixed_length`` divides by.

        Raises:
            ConfigError: a name that is not installed, or an option that a part does not take.
        """
        from asyncrl.algorithms import Correction, PolicyLoss, PolicyObjective
        from asyncrl.errors import ConfigError
        from asyncrl.parts import make_part

        parts: dict[str, object] = {}
        for key, name, options, kind in (
            ("loss", self.loss, self.loss_options, PolicyLoss),
            ("correction", self.correction, self.correction_options, Correction),
        ):
            group = {"loss": "asyncrl.policy_losses", "correction": "asyncrl.corrections"}[key]
            path = f"algorithm.{key}"
            part = make_part(group, name, options=options, path=path, table=f"{path}_options")
            if not isinstance(part, kind):
                remedy = f"name a subclass of asyncrl.algorithms.{kind.__name__}"
                raise ConfigError(f"{path} = {name!r} is no {kind.__name__}; {remedy}", path=path, remedy=remedy)
            parts[key] = part
        return PolicyObjective(
            **parts,  # type: ignore[arg-type]  # checked just above
            anchor=self.anchor,
            kl_coefficient=self.kl_coefficient if self.kl_placement == "loss" else 0.0,
            kl_estimator=self.kl_estimator,
            entropy_coefficient=self.entropy_coefficient,
            aggregation=self.aggregation,
            fixed_length=longest if self.aggregation == "fixed_length" else None,
            whiten=self.whiten,
        )

    def controller(self, coefficient: float | None = None) -> KLController | None:
        """What steers the coefficient of a penalty in the reward, from ``coefficient`` on; None without a penalty."""
        if self.kl_placement == "loss" or not self.kl_coefficient:
            return None
        from asyncrl.algorithms import AdaptiveKL, FixedKL

        start = self.kl_coefficient if coefficient is None else coefficient
        if self.kl_target is None:
            return FixedKL(coefficient=start)
        return AdaptiveKL(coefficient=start, target=self.kl_target, horizon=self.kl_horizon)

    def estimator(self) -> AdvantageEstimator:
        """The advantage estimator.

        Raises:
            ConfigError: a name that is not installed, or an option that it does not take.
        """
        from asyncrl.algorithms import load_estimator

        return load_estimator(self.advantage, options=self.advantage_options)


def check_algorithm(config: Config) -> tuple[Objection, ...]:
    """Hold the algorithm of a run against what it is used on; imports what it names.

    Returns:
        Objections that `allow_unsound` overrides, to be told.

    Raises:
        ConfigError: a part that cannot be made, or all combinations that are refused, each with its reason.
    """
    if config.steps == 0:
        return ()
    from asyncrl.algorithms.soundness import Setting, objections

    algorithm, trainer = config.algorithm, config.trainer
    setting = Setting(
        # Where old tokens are corrected instead of left out, none of a run can be older than its steps.
        max_staleness=config.steps if config.staleness_policy.too_old == "correct" else config.max_staleness,
        optimizer_steps=trainer.minibatches * trainer.epochs,
        group_size=trainer.group_size,
    )
    objective, estimator = algorithm.objective(longest=config.rollout.max_tokens), algorithm.estimator()
    found = tuple(objections(objective, estimator, setting))
    if config.buffer.options.get("max_uses", 1) != 1:
        often = "are told once for a group, and buffer.options.max_uses takes groups more often"
        if algorithm.kl_placement == "reward":
            path, remedy = "algorithm.kl_placement", 'use kl_placement = "loss", or max_uses = 1'
            raise_problems([Problem(path, f"divergences {often}", value='"reward"', remedy=remedy)])
        for column, what in (("greedy_rewards", "greedy rewards"), ("divergences", "divergences")):
            if column in estimator.needs:
                path, remedy = "algorithm.advantage", "use another advantage, or max_uses = 1"
                value = value_to_toml(algorithm.advantage)
                raise_problems([Problem(path, f"{what} {often}", value=value, remedy=remedy)])
    if "divergences" in estimator.needs and algorithm.kl_coefficient and algorithm.kl_placement == "reward":
        path = "algorithm.kl_placement"
        rule = (
            "this advantage holds the policy to the reference itself: a penalty in the reward would decide pairs, too"
        )
        raise_problems(
            [Problem(path, rule, value='"reward"', remedy='use kl_placement = "loss", or kl_coefficient = 0')]
        )
    refused = [each for each in found if not (each.unsound and algorithm.allow_unsound)]
    if refused:
        override = "; algorithm.allow_unsound = true runs it all the same"
        raise_problems(
            [
                Problem(
                    each.key, each.reason, value=_value(config, each.key), remedy=each.remedy + override * each.unsound
                )
                for each in refused
            ]
        )
    return found


def _value(config: Config, key: str) -> str:
    value: object = config
    for name in key.split("."):
        if isinstance(value, dict) and name not in value:
            return ""  # an option's default
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value_to_toml(value)
