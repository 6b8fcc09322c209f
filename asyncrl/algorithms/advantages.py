"""Advantage estimators: from the rewards of a batch to one advantage per row, turn or token.

The functions take ``rewards`` [B] floating, one per row; most take ``groups`` [B] integer, equal for the rows of one
prompt (any order, any sizes, but a group must be whole: its baseline is made of the rows that are here), and some
``lengths`` [B] integer, the sampled tokens of each row. They return float32 without gradient, [B] unless the docstring
says otherwise, and raise :class:`SchemaError` where shapes or dtypes are others, :class:`InvalidDataError` where a
reward is not finite; the message names the row.

:class:`AdvantageEstimator` is one of them under its name, with its options; :func:`load_estimator` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, Literal, cast

import torch
from torch import Tensor

from asyncrl.algorithms.preference import PreferenceObjective, preference_pairs
from asyncrl.errors import ConfigError, InvalidDataError, SchemaError, UserCodeError
from asyncrl.plugins import Part, load_part, make_part, part_text


def check_rewards(rewards: Tensor, **columns: Tensor) -> Tensor:
    """Return ``rewards`` [B] in float64, without gradient; check that ``columns`` are integers of the same shape."""
    if rewards.ndim != 1 or not rewards.dtype.is_floating_point:
        raise SchemaError(f"rewards must be [B] floating, got {rewards.dtype} of shape {tuple(rewards.shape)}")
    for name, column in columns.items():
        if column.shape != rewards.shape or column.dtype.is_floating_point or column.dtype == torch.bool:
            raise SchemaError(
                f"{name} must be {tuple(rewards.shape)} integers like rewards, "
                f"got {column.dtype} of shape {tuple(column.shape)}"
            )
    wide = rewards.detach().double()
    bad = (~wide.isfinite()).nonzero().flatten().tolist()
    if bad:
        group = f" (group {int(columns['groups'][bad[0]])})" if "groups" in columns else ""
        raise InvalidDataError(
            f"reward of row {bad[0]}{group} is {float(wide[bad[0]])}"
            + (f"; rows {bad[1:]} are not finite either" if bad[1:] else "")
            + ": a reward must be a finite number, and a row without one must not reach the advantages"
        )
    return wide


def successes(rewards: Tensor | Sequence[float], success_reward: float) -> Tensor:
    """Return which rewards [B] reach ``success_reward``, both rounded to float32, in which a batch keeps rewards.

    >>> successes([0.9, float(torch.tensor(0.9)), 0.8], 0.9)
    tensor([ True,  True, False])
    """
    return torch.as_tensor(rewards).float() >= torch.tensor(success_reward, dtype=torch.float32)


class Groups:
    """The rewards of a batch by group, in float64; all columns are [B].

    ``sizes`` are the rows in each row's group, ``deviations`` the reward minus the group's mean: exactly 0 in groups
    whose rewards are all equal (``equal``).
    """

    def __init__(self, rewards: Tensor, groups: Tensor) -> None:
        self.rewards = check_rewards(rewards, groups=groups)
        self._index = torch.unique(groups, return_inverse=True)[1].to(self.rewards.device)
        self.sizes = self.sum(torch.ones_like(self.rewards))
        # The mean of equal numbers need not be that number in floating point (three times 0.1), so equality is tested.
        self.equal = self.extreme(self.rewards, "amax") == self.extreme(self.rewards, "amin")
        self.deviations = torch.where(self.equal, 0.0, self.rewards - self.sum(self.rewards) / self.sizes)

    def sum(self, values: Tensor) -> Tensor:
        """Return, for each row, the sum of ``values`` over its group."""
        return torch.zeros_like(values).index_add_(0, self._index, values)[self._index]

    def extreme(self, values: Tensor, reduce: str) -> Tensor:
        """Return, for each row, the largest (``amax``) or smallest (``amin``) of ``values`` in its group."""
        extremes = torch.empty_like(values).scatter_reduce_(0, self._index, values, reduce, include_self=False)
        return extremes[self._index]

    def normalised(self, epsilon: float) -> Tensor:
        """Return the deviations divided by the group's sample standard deviation (over G - 1) plus ``epsilon``."""
        variance = self.sum(self.deviations.square()) / (self.sizes - 1).clamp(min=1)
        return self.deviations / (variance.sqrt() + epsilon)


# ---------------------------------------------------------------------------------------------- relative to the group


def grpo_advantages(rewards: Tensor, groups: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Return (reward - mean) / (standard deviation + epsilon) of the group. GRPO, arXiv:2402.03300, section 4.1.2.

    The deviation is the sample one (divided by G - 1), as in the implementations in wide use.

    >>> grpo_advantages(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([7, 7, 8]))
    tensor([-0.7071,  0.7071,  0.0000])
    """
    return Groups(rewards, groups).normalised(epsilon).float()


def dr_grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return the reward minus the group's mean, not divided by anything. Dr. GRPO, arXiv:2503.20783, section 3.2.

    Dividing by the deviation gives more weight to prompts that are nearly always or nearly never solved; this does not.

    >>> dr_grpo_advantages(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([7, 7, 8]))
    tensor([-0.5000,  0.5000,  0.0000])
    """
    return Groups(rewards, groups).deviations.float()


def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return the reward minus the mean of the *other* rows: G / (G - 1) times Dr. GRPO's. RLOO, arXiv:2402.14740.

    >>> rloo_advantages(torch.tensor([0.0, 0.0, 3.0]), torch.tensor([7, 7, 7]))
    tensor([-1.5000, -1.5000,  3.0000])
    """
    found = Groups(rewards, groups)
    return (found.deviations * found.sizes / (found.sizes - 1).clamp(min=1)).float()


def opo_advantages(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Return the reward minus the group's length-weighted mean. OPO, arXiv:2505.23585.

    That is the baseline of least variance where a row's squared gradient grows with its length. A group without any
    token gets the plain mean as its baseline.

    >>> opo_advantages(torch.tensor([0.0, 1.0]), torch.tensor([7, 7]), torch.tensor([3, 1]))
    tensor([-0.2500,  0.7500])
    """
    found = Groups(rewards, groups)
    check_rewards(rewards, lengths=lengths)
    wide = lengths.to(found.rewards.device).double()
    weights = torch.where(found.sum(wide) > 0, wide, 1.0)
    baseline = found.sum(weights * found.rewards) / found.sum(weights)
    return torch.where(found.equal, 0.0, found.rewards - baseline).float()


def pass_at_k_advantages(rewards: Tensor, groups: Tensor, *, k: int = 4, success_reward: float = 1.0) -> Tensor:
    """Return the advantages when ``k`` answers may be given and one right one is enough. arXiv:2508.10751, eq. 14, 15.

    All subsets of k rows of the group are averaged over in closed form. With F failures among G rows, a subset fails
    with probability q = C(F, k) / C(G, k), its mean reward is 1 - q and its deviation s = sqrt(q (1 - q)):

        success: q / s        failure: (q - C(F - 1, k - 1) / C(G - 1, k - 1)) / s

    A failure is only blamed for the subsets that fail without it as well, and prompts that k answers always or never
    solve get 0. A row counts as a success from ``success_reward`` on.

        >>> pass_at_k_advantages(torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), k=1)
        tensor([ 1., -1.])

    Raises:
        ConfigError: ``k`` is below 1.
        InvalidDataError: a group has fewer than ``k`` rows.
    """
    if k < 1:
        raise ConfigError(f"k is {k}", path="k", remedy="at least 1")
    found = Groups(rewards, groups)
    if len(found.sizes) and int(found.sizes.min()) < k:
        row = int(found.sizes.argmin())
        raise InvalidDataError(f"group {int(groups[row])} has {int(found.sizes[row])} rows; pass@{k} needs {k}")
    failed = (~successes(rewards, success_reward)).double()
    failures = found.sum(failed)
    all_fail = _binomial_ratio(failures, found.sizes, k)
    deviation = (all_fail * (1.0 - all_fail)).sqrt()
    others_fail = _binomial_ratio(failures - 1.0, found.sizes - 1.0, k - 1)
    centred = all_fail - failed * others_fail
    return torch.where(deviation > 0, centred / deviation.clamp(min=1e-300), 0.0).float()


def _binomial_ratio(n: Tensor, total: Tensor, k: int) -> Tensor:
    """Return C(n, k) / C(total, k) as a product; 0 where ``n`` < k. ``total`` >= k."""
    share = torch.ones_like(n)
    for taken in range(k):
        share = share * ((n - taken).clamp(min=0.0) / (total - taken))
    return share


def best_of_group_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return best - second best for the best row of a group, 0 for all others: what the maximum loses without it.

    The leave-one-out baseline of the maximum over the group, arXiv:2503.19595. Of several best rows, all get 0.

    >>> best_of_group_advantages(torch.tensor([0.25, 1.0, 0.5]), torch.tensor([7, 7, 7]))
    tensor([0.0000, 0.5000, 0.0000])
    """
    found = Groups(rewards, groups)
    best = found.extreme(found.rewards, "amax")
    is_best = found.rewards == best
    alone = is_best & (found.sum(is_best.double()) == 1.0) & (found.sizes > 1.0)
    second = found.extreme(torch.where(is_best, -torch.inf, found.rewards), "amax")
    return torch.where(alone, best - second, 0.0).float()


def online_dpo_advantages(
    rewards: Tensor,
    groups: Tensor,
    divergences: Tensor,
    *,
    beta: float = 0.1,
    kind: Literal["dpo", "ipo"] = "dpo",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return minus the slope of the preference loss in each row's log-prob. Online AI feedback, arXiv:2402.04792.

    The best row of a prompt is compared with the worst, the second best with the second worst, as long as their rewards
    differ; rows without a partner get 0. A policy step with these advantages on every token is then one of DPO or IPO
    on the mean over pairs, as long as all tokens of a batch weigh the same (``token_mean``, ``fixed_length``);
    ``sequence_mean`` normalises by length. ``divergences`` [B] are log(policy / reference) of each row, its sampled
    tokens summed, under the policy that sampled: exact for samples of the weights at the start of the step, as old as
    the samples for others. For the options see :class:`~asyncrl.algorithms.PreferenceObjective`.

        >>> online_dpo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), torch.zeros(2), beta=0.5)
        tensor([ 0.5000, -0.5000])

    Raises:
        SchemaError: shapes differ.
    """
    if divergences.shape != rewards.shape:
        raise SchemaError(f"divergences must be {tuple(rewards.shape)} like rewards, got {tuple(divergences.shape)}")
    objective = PreferenceObjective(kind=kind, beta=beta, label_smoothing=label_smoothing)
    pairs = preference_pairs(rewards.detach(), groups)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    if len(pairs) == 0:
        return advantages.float()
    chosen, rejected = pairs[0::2], pairs[1::2]
    ratio = divergences.detach().double()
    nothing = torch.zeros(len(chosen), dtype=torch.float64)
    slopes = objective.pair_losses(
        chosen_log_probs=ratio[chosen],
        rejected_log_probs=ratio[rejected],
        reference_chosen_log_probs=nothing,
        reference_rejected_log_probs=nothing,
    ).advantage
    advantages[chosen], advantages[rejected] = slopes, -slopes
    # The loss of a batch is a mean over its rows; DPO's is one over its pairs.
    return (advantages * len(rewards) / len(chosen)).float()


# ---------------------------------------------------------------------------------------- over the batch, or a baseline


def reinforce_plus_plus_advantages(rewards: Tensor, lengths: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Return (reward - mean) / (standard deviation + epsilon) over the batch's tokens. REINFORCE++, arXiv:2501.03262.

    Every token of a row has the row's return (no discount; a KL penalty belongs into the reward), so a row counts as
    often as it has tokens, and a row without tokens gets 0. A batch of equal rewards gets exactly 0.

    >>> reinforce_plus_plus_advantages(torch.tensor([1.0, 0.0]), torch.tensor([2, 2]))  # deviation: the root of 1 / 3
    tensor([ 0.8660, -0.8660])
    """
    return _whitened(check_rewards(rewards, lengths=lengths), lengths, epsilon=epsilon)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, groups: Tensor, lengths: Tensor, *, epsilon: float = 1e-8
) -> Tensor:
    """Return :func:`reinforce_plus_plus_advantages` of rewards minus their group's mean. arXiv:2501.03262.

    Unlike GRPO's, the deviation is that of the batch: a prompt does not weigh more because its rewards differ little.

        >>> groups, lengths = torch.tensor([7, 7]), torch.tensor([2, 2])
        >>> reinforce_plus_plus_baseline_advantages(torch.tensor([6.0, 5.0]), groups, lengths)
        tensor([ 0.8660, -0.8660])
    """
    check_rewards(rewards, lengths=lengths)
    return _whitened(Groups(rewards, groups).deviations, lengths, epsilon=epsilon)


def _whitened(values: Tensor, lengths: Tensor, *, epsilon: float) -> Tensor:
    weights = lengths.to(values.device).double()
    total = weights.sum()
    present = values[weights > 0]
    if len(present) == 0 or bool((present == present[0]).all()):
        return torch.zeros_like(values).float()
    mean = (weights * values).sum() / total
    # Divided by T - 1, the sample variance over tokens.
    deviation = ((weights * (values - mean).square()).sum() / (total - 1.0)).sqrt()
    return torch.where(weights > 0, (values - mean) / (deviation + epsilon), 0.0).float()


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Return the reward minus that of the greedy answer to the same prompt [B]. ReMax, arXiv:2310.10505.

        >>> remax_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
        tensor([ 0.5000, -0.5000])

    Raises:
        SchemaError: shapes differ.
    """
    if greedy_rewards.shape != rewards.shape:
        raise SchemaError(
            f"greedy_rewards must be {tuple(rewards.shape)} like rewards, got {tuple(greedy_rewards.shape)}"
        )
    return (check_rewards(rewards) - check_rewards(greedy_rewards)).float()


# ------------------------------------------------------------------------------------------------- of turns and tokens


def gigpo_advantages(
    rewards: Tensor,
    groups: Tensor,
    turn_rewards: Tensor,
    turn_rows: Tensor,
    turn_anchors: Tensor,
    turn_parents: Tensor | None = None,
    *,
    gamma: float = 0.95,
    weight: float = 1.0,
    normalise: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """Return the advantage of every turn [K]: episode-relative plus ``weight`` times step-relative. arXiv:2505.10978.

    Turns of one group that start from the same state are compared with one another by their return from there,
    discounted by ``gamma`` per turn; whole episodes as in GRPO, or with ``normalise`` False as in Dr. GRPO.
    ``turn_rewards`` [K] are the rewards of single turns (those of a row in their order), ``turn_rows`` [K] the row of
    each turn, ``turn_anchors`` [K] integers that are equal for turns which begin in the same state (a hash of it).
    In trees ``turn_parents`` [K] are the places, among all K, of the turns that each continues (-1: none); after one
    that several continue, the return is the mean over them.

        >>> earned = torch.tensor([1.0, 0.0])  # by two rows of one prompt, a turn each, which begin in the same state
        >>> rows, states = torch.tensor([0, 1]), torch.tensor([9, 9])
        >>> gigpo_advantages(earned, torch.tensor([5, 5]), earned, rows, states, normalise=False)
        tensor([ 1., -1.])

    Raises:
        SchemaError: shapes or dtypes differ.
        InvalidDataError: a turn's row does not exist, or it continues itself or a later one.
    """
    if turn_rows.shape != turn_rewards.shape or turn_anchors.shape != turn_rewards.shape or turn_rewards.ndim != 1:
        raise SchemaError(
            f"turn_rewards, turn_rows and turn_anchors must be [K], got {tuple(turn_rewards.shape)}, "
            f"{tuple(turn_rows.shape)} and {tuple(turn_anchors.shape)}"
        )
    if len(turn_rows) and not 0 <= int(turn_rows.min()) <= int(turn_rows.max()) < len(rewards):
        raise InvalidDataError(f"turn_rows must lie in 0..{len(rewards) - 1}")

    def relative(found: Groups) -> Tensor:
        return found.normalised(epsilon) if normalise else found.deviations

    episodes = relative(Groups(rewards, groups))
    parents = _turns_before(turn_rows) if turn_parents is None else turn_parents.tolist()
    if len(parents) != len(turn_rows) or not all(-1 <= parent < turn for turn, parent in enumerate(parents)):
        raise InvalidDataError("turn_parents must be [K], of each turn one before it or -1")
    returns = turn_rewards.detach().double().tolist()
    following: list[list[float]] = [[] for _ in parents]
    for turn, parent in reversed([*enumerate(parents)]):
        if following[turn]:
            returns[turn] += gamma * sum(following[turn]) / len(following[turn])
        if parent >= 0:
            following[parent].append(returns[turn])
    pairs = torch.stack([groups.to(turn_anchors.device)[turn_rows].long(), turn_anchors.long()], dim=1)
    states = torch.unique(pairs, dim=0, return_inverse=True)[1] if len(pairs) else turn_anchors.long()
    steps = relative(Groups(turn_rewards.new_tensor(returns, dtype=torch.float64), states))
    return (episodes[turn_rows] + weight * steps).float()


def _turns_before(turn_rows: Tensor) -> list[int]:
    """Return the place of the turn of the same row before each turn, -1 for the first."""
    last: dict[int, int] = {}
    parents: list[int] = []
    for turn, row in enumerate(turn_rows.tolist()):
        parents.append(last.get(row, -1))
        last[row] = turn
    return parents


def gae(
    token_rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the advantage and the return of every sampled token, both [T]. Schulman et al., arXiv:1506.02438, eq. 16.

        delta_t = reward_t + gamma * value_{t+1} - value_t
        advantage_t = delta_t + gamma * gae_lambda * advantage_{t+1}
        return_t = advantage_t + value_t

    Only sampled tokens are steps: observations between two turns are not actions and are left out before.

        >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.75]), torch.tensor([2]), gae_lambda=0.5)
        (tensor([0.3750, 0.2500]), tensor([0.8750, 1.0000]))

    Args:
        token_rewards: [T] floating, row after row without padding; an outcome's reward stands at a row's last token.
        values: [T] floating, the critic's value *before* each token is sampled.
        lengths: [B] integer, sampled tokens of each row; they sum to T.
        gamma: 0..1
        gae_lambda: 0..1; 1 is the plain return, 0 the one-step error.
        last_values: [B] value after a row's last token: 0 (None) for a finished row, the critic's for one cut off.

    Raises:
        SchemaError: shapes do not fit together.
    """
    batch, tokens = len(lengths), int(lengths.sum())
    if token_rewards.shape != (tokens,) or values.shape != (tokens,):
        raise SchemaError(
            f"token_rewards and values must be [{tokens}], one per sampled token, "
            f"got {tuple(token_rewards.shape)} and {tuple(values.shape)}"
        )
    if last_values is not None and last_values.shape != (batch,):
        raise SchemaError(f"last_values must be [{batch}], one per row, got {tuple(last_values.shape)}")
    counts = lengths.to(token_rewards.device)
    row_of = torch.repeat_interleave(torch.arange(batch, device=counts.device), counts)
    # Steps until the row's end: 0 for its last token. Rows lie in a rectangle with their ends together.
    to_end = (torch.cumsum(counts, 0)[row_of] - 1) - torch.arange(tokens, device=counts.device)
    width = int(counts.max()) if batch else 0
    reward = token_rewards.detach().double().new_zeros(width, batch)
    value = torch.zeros_like(reward)
    reward[to_end, row_of] = token_rewards.detach().double()
    value[to_end, row_of] = values.detach().double()
    after = torch.zeros(batch, dtype=torch.float64, device=counts.device)
    following = after if last_values is None else last_values.detach().double()
    advantages = torch.zeros_like(reward)
    for step in range(width):
        delta = reward[step] + gamma * following - value[step]
        after = delta + gamma * gae_lambda * after
        advantages[step] = after
        following = value[step]
    chosen = advantages[to_end, row_of]
    return chosen.float(), (chosen + values.detach().double()).float()


def gae_advantages(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float = 1.0, gae_lambda: float = 0.95
) -> Tensor:
    """Return the advantages of :func:`gae` alone, [T]. arXiv:1506.02438, eq. 16.

    >>> gae_advantages(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.75]), torch.tensor([2]), gae_lambda=1.0)
    tensor([0.5000, 0.2500])
    """
    return gae(token_rewards, values, lengths, gamma=gamma, gae_lambda=gae_lambda)[0]


# ---------------------------------------------------------------------------------------------------------- by name


TOKEN_COLUMNS = frozenset({"token_rewards", "values"})
"""Columns [T] of sampled tokens. An estimator that needs one gets each row alone and returns [T]."""

TURN_COLUMNS = frozenset({"turn_rewards", "turn_rows", "turn_anchors", "turn_parents"})
"""Columns [K] of turns. An estimator that needs one returns [K]."""


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A function from columns of a batch to advantages, with its options.

    The function's signature declares what it needs: its positional parameters are names of columns, its keyword-only
    parameters are options. The columns of a training step:

        rewards         [B] float32   return of each row
        groups          [B] int64     equal for the rows of one prompt
        lengths         [B] int64     sampled tokens of each row
        greedy_rewards  [B]           reward of a greedy answer to the row's prompt, rolled out for it
        divergences     [B]           log(policy that sampled / reference) of each row, its sampled tokens summed

        turn_rewards    [K] float32   of all turns, row after row: its reward; the last of a row, or every one of a
                                      tree that none continues, has what no turn earned, too
        turn_rows       [K] int64     row of each turn
        turn_anchors    [K] int64     within a group equal for turns that begin in the same state
        turn_parents    [K] int64     turn that each continues, by its place among all; -1: none

        token_rewards   [T] float32   of all sampled tokens, row after row: rewards at the ends of their turns
        values          [T] float32   a critic's, before each of them

    It returns as many numbers as the finest of its columns has: [B], [K] or [T]. One of tokens gets some whole rows at
    a time, so beside its columns it may have ``rewards`` and ``lengths`` but no groups. A user's function of that form
    is named by its path, ``package.module:function``.

        >>> def above_half(rewards, *, slope=1.0):
        ...     return slope * (rewards - 0.5)
        >>> estimator = AdvantageEstimator("above_half", above_half, {"slope": 2.0})
        >>> estimator({"rewards": torch.tensor([1.0, 0.0]), "groups": torch.tensor([3, 3])})
        tensor([ 1., -1.])
    """

    part: Part
    function: Callable[..., Tensor]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name, or the dotted path of its function."""
        return part_text(self.part)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the columns that its function has no default for."""
        return tuple(name for name, each in _columns(self.function).items() if each.default is Parameter.empty)

    @property
    def level(self) -> Literal["row", "turn", "token"]:
        """What gets an advantage each."""
        needs = set(self.needs)
        return "token" if needs & TOKEN_COLUMNS else "turn" if needs & TURN_COLUMNS else "row"

    def option(self, name: str) -> Any:
        """Return the value of an option, by default the function's; None if it takes no such option."""
        parameter = signature(self.function).parameters.get(name)
        if parameter is None or parameter.kind is not parameter.KEYWORD_ONLY:
            return None
        return self.options.get(name, parameter.default)

    def __call__(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the advantages of a batch, [B], [K] or [T] float32 by :attr:`level`.

        Raises:
            SchemaError: a column it needs is missing.
            UserCodeError: the function did not return as many finite numbers.
        """
        missing = [name for name in self.needs if name not in columns]
        if missing:
            raise SchemaError(f"advantage {self.name!r} needs {', '.join(missing)}; the batch has {', '.join(columns)}")
        given = {name: columns[name] for name in _columns(self.function) if name in columns}
        advantages = self.function(**given, **self.options)
        rows = len(columns[{"row": "rewards", "turn": "turn_rewards", "token": "token_rewards"}[self.level]])
        if isinstance(advantages, Tensor):
            advantages = advantages.detach().to(torch.float32)
        if not isinstance(advantages, Tensor) or advantages.shape != (rows,) or not bool(advantages.isfinite().all()):
            shape = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
            raise UserCodeError(f"advantage {self.name!r} must return [{rows}] finite numbers, got {shape}")
        return advantages


def load_estimator(
    name: Part, *, options: Mapping[str, Any] | None = None, path: str = "algorithm.advantage"
) -> AdvantageEstimator:
    """Return the estimator ``name``: an entry point of ``asyncrl.advantages``, ``package.module:function``, or it.

        >>> rloo, gae = load_estimator("rloo"), load_estimator("gae", options={"gamma": 0.99})
        >>> rloo.needs, rloo.level, gae.level, gae.option("gamma")
        (('rewards', 'groups'), 'row', 'token', 0.99)

    Raises:
        ConfigError: no such estimator, or an option it does not take; the message names ``path``, the key of the
            configuration that names the estimator, or ``<path>_options``.
    """
    part, shown = load_part("asyncrl.advantages", name, path=path), part_text(name)
    if isinstance(part, type):  # its instance is the function
        table = f"{path}_options"
        name = part = make_part("asyncrl.advantages", part, options=options or {}, path=path, table=table)
        options = {}
    if not callable(part):
        raise ConfigError(f"{path}: advantage {shown!r} is not a function", path=path, remedy="name a function")
    function = cast("Callable[..., Tensor]", part)
    allowed = [each.name for each in signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    for option in options or {}:
        if option not in allowed:
            near = get_close_matches(option, allowed, n=1)
            remedy = (f"did you mean {near[0]!r}? " if near else "") + f"allowed: {', '.join(allowed) or 'none'}"
            key = f"{path}_options.{option}"
            raise ConfigError(f"{key}: advantage {shown!r} has no option {option!r}; {remedy}", path=key, remedy=remedy)
    return AdvantageEstimator(name, function, dict(options or {}))


def _columns(function: Callable[..., Tensor]) -> dict[str, Parameter]:
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.POSITIONAL_ONLY)
    return {name: each for name, each in signature(function).parameters.items() if each.kind in kinds}
