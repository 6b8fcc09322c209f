"""Log-probs and entropies from hidden states, without holding the logits of all tokens at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from asyncrl.algorithms import log_probs_and_entropy

P = ParamSpec("P")
ReturnT = TypeVar("ReturnT")

Extras: TypeAlias = Literal["none", "entropy", "entropy_gradient", "correct"]
"""Computed beside the log-prob: nothing, entropy without or with its gradient, or whether the token is the argmax."""


class TokenScores(NamedTuple):
    """Scores of N tokens; float32. A named tuple, because FSDP looks for tensors in what a module returns."""

    log_probs: Tensor  # [N]
    entropy: Tensor  # [N] nats, of the distributions that the tokens come from; empty unless asked for
    correct: Tensor  # [N] 1 where the token is the most likely one, else 0; empty unless asked for


class Head(NamedTuple):
    """An output head that is one matrix: ``softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)``.

    Each rank of ``group`` may have some rows of weight and bias, as many as the others, in the order of the ranks. All
    score the same tokens, and none ever has another's logits.
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None  # bound of the logits' absolute value
    group: ProcessGroup | None = None


def token_log_probs(
    hidden: Tensor,
    targets: Tensor,
    *,
    head: Head | Callable[[Tensor], Tensor],
    vocabulary: int,
    extras: Extras = "none",
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
    kept_bytes: int = 256 * 2**20,
    backend: str | None = None,
    device_type: str | None = None,
) -> TokenScores:
    """Score ``targets`` [N] under softmax(logits / temperature), with logits = ``head`` of ``hidden``.

    ``hidden`` [N, H] are last hidden states, each at the position *before* its target; ``temperature`` is the one the
    tokens were sampled with; ``head`` is a matrix, or (slower) any function [n, H] -> [n, V].

    Tokens are processed in chunks of ``chunk_bytes`` of float32 logits, by default 64 MiB on a CPU and 512 MiB on a
    device, where each chunk also costs a pass over the gradient of the matrix. The logits of the first chunks, at most
    ``kept_bytes``, are kept for the backward pass; those of the others are computed again, one chunk at a time, and
    their gradient is added to those of hidden states and head at once. No other logits are in memory than the kept
    ones, one chunk, and its gradient. With a ``backend`` of ``torch.compile`` the passes over them are compiled.
    ``device_type`` is whose way is taken, if not that of the device where ``hidden`` lies.
    """
    if isinstance(head, Head):
        vocabulary = len(head.weight)
    on_cpu = (device_type or hidden.device.type) == "cpu"
    if chunk_bytes is None:
        chunk_bytes = (64 if on_cpu else 512) * 2**20
    chunk = max(1, chunk_bytes // (4 * vocabulary))
    if isinstance(head, Head):
        kept = kept_bytes // (4 * vocabulary)
        first = head.group.rank() * vocabulary if head.group is not None else 0
        scores = _HeadScores.apply(  # type: ignore[no-untyped-call]  # torch leaves apply unannotated
            hidden,
            targets,
            head.weight,
            head.bias,
            _Options(head.scale, head.softcap, temperature, extras, chunk, kept, head.group, first, backend, on_cpu),
        )
        return TokenScores(*scores)
    return _by_function(hidden, targets, head, extras=extras, temperature=temperature, chunk=chunk)


class _Options(NamedTuple):
    """The arguments of a scoring that are not tensors.

    ``chunk`` and ``kept`` are numbers of tokens, ``first`` is the id of the first row of the matrix that this rank has.
    """

    scale: float
    softcap: float | None
    temperature: float
    extras: Extras
    chunk: int
    kept: int
    group: ProcessGroup | None
    first: int
    backend: str | None
    on_cpu: bool

    def reduce(self, column: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the parts of the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(column, operation, group=self.group)
        return column

    def places(self, targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the column of each target among the ``size`` ones of this rank, and whether it is one of them."""
        if self.group is None:
            return targets, torch.ones_like(targets, dtype=torch.bool)
        places = targets - self.first
        return places.clamp(0, size - 1), (places >= 0) & (places < size)


class _HeadScores(torch.autograd.Function):
    """Head and log-softmax in one. With x = logits / temperature, p = softmax(x), H = -sum p log p.

    d log p_target / d x_j = [j = target] - p_j
    d H            / d x_j = -p_j (log p_j + H)

    Sums over the vocabulary are taken relative to the largest x, m: s = sum e^(x - m), and
    log p_j = (x_j - m) - log s, which keeps the digits of large logits. Each part of the vocabulary has an m and s of
    its own at first.
    """

    @staticmethod
    def forward(
        ctx: Any,  # torch's context object: attributes are set on it freely
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = _wide(hidden.dtype)
        # Over this rank's part of the vocabulary: m, s, sum of (x - m) e^(x - m), and x_target - m; [N] each.
        top, total, weighted, chosen = (torch.empty(len(targets), dtype=wide, device=hidden.device) for _ in range(4))
        largest = torch.empty_like(targets)
        places, here = options.places(targets, len(weight))
        with_entropy = options.extras in ("entropy", "entropy_gradient")
        differentiated = any(ctx.needs_input_grad)
        sums_of = _compiled(_sums, options.backend)
        kept: list[Tensor] = []
        for part in _parts(len(targets), options.chunk):
            logits = _logits(hidden[part], weight, bias, options)
            for block in _blocks(logits, options):
                these = slice(part.start + block.start, part.start + block.stop)
                top[these], largest[these], chosen[these], total[these], weighted[these] = sums_of(
                    logits[block], places[these], temperature=options.temperature, extras=options.extras
                )
            if differentiated and part.stop <= options.kept:
                kept.append(logits)
        whole_top = options.reduce(top.clone(), dist.ReduceOp.MAX)
        apart = top - whole_top
        correct = top.new_empty(0)
        if options.extras == "correct":
            unset = torch.iinfo(largest.dtype).max
            found = options.reduce(torch.where(apart == 0, largest + options.first, unset), dist.ReduceOp.MIN)
            correct = (found == targets).to(wide)
        share = apart.exp()
        sums = options.reduce(
            torch.stack(
                [
                    total * share,
                    torch.where(here, chosen + apart, 0.0),
                    (weighted + total * apart) * share if with_entropy else total,
                ]
            )
        )
        log_total = sums[0].log()
        log_probs = sums[1] - log_total
        entropy = log_total - sums[2] / sums[0] if with_entropy else top.new_empty(0)
        ctx.save_for_backward(hidden, targets, weight, bias, entropy, whole_top, log_total, *kept)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(correct, *([entropy] if options.extras != "entropy_gradient" else []))
        return log_probs, entropy, correct

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the parameter's name
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:
        by_log_prob, by_entropy, _ = gradients
        if by_log_prob is None and by_entropy is None:
            return None, None, None, None, None
        hidden, targets, weight, bias, entropy, top, log_total, *kept = ctx.saved_tensors
        options: _Options = ctx.options
        places, here = options.places(targets, len(weight))
        wants_hidden, _, wants_weight, wants_bias, _ = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        # Sums over chunks are float32 even where single products are not.
        wide = _wide(hidden.dtype)
        weight_gradient = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wants_weight else None
        bias_gradient = torch.zeros(len(weight), dtype=wide, device=weight.device) if wants_bias else None
        for number, part in enumerate(_parts(len(targets), options.chunk)):
            logits = kept[number] if number < len(kept) else _logits(hidden[part], weight, bias, options)
            gradient = torch.empty_like(logits)
            for block in _blocks(logits, options):
                these = slice(part.start + block.start, part.start + block.stop)
                gradient[block] = _compiled(_logits_gradient, options.backend)(
                    logits[block],
                    places[these],
                    here[these],
                    by_log_prob[these] if by_log_prob is not None else None,
                    by_entropy[these] if by_entropy is not None else None,
                    entropy=entropy[these],
                    top=top[these],
                    log_total=log_total[these],
                    temperature=options.temperature,
                    scale=options.scale,
                    softcap=options.softcap,
                )
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[part])
            if weight_gradient is not None:
                if wide == gradient.dtype:
                    weight_gradient.addmm_(gradient.T, hidden[part])
                else:
                    weight_gradient += gradient.T @ hidden[part]
            if bias_gradient is not None:
                bias_gradient += gradient.sum(dim=0, dtype=wide)
        if hidden_gradient is not None:
            options.reduce(hidden_gradient)
        return (
            hidden_gradient,
            None,
            weight_gradient.to(weight.dtype) if weight_gradient is not None else None,
            bias_gradient.to(weight.dtype) if bias_gradient is not None else None,
            None,
        )


@cache
def _compiled(function: Callable[P, ReturnT], backend: str | None) -> Callable[P, ReturnT]:
    return function if backend is None else torch.compile(function, backend=backend)


def _sums(
    logits: Tensor, places: Tensor, *, temperature: float, extras: Extras
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return m, its place (if ``correct`` is wanted), x_target - m, s, and sum of (x - m) e^(x - m) (with entropy)."""
    x = _tempered(logits, temperature)
    top = x.amax(dim=-1)
    largest = x.argmax(dim=-1) if extras == "correct" else places
    x = x - top[:, None]
    chosen = x.gather(1, places[:, None]).squeeze(1)
    e = x.exp()
    total = e.sum(dim=-1)
    return top, largest, chosen, total, _dot(e, x) if extras in ("entropy", "entropy_gradient") else total


def _logits_gradient(
    logits: Tensor,
    places: Tensor,
    here: Tensor,
    by_log_prob: Tensor | None,
    by_entropy: Tensor | None,
    *,
    entropy: Tensor,
    top: Tensor,
    log_total: Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient [n, V] with respect to the product of hidden states and matrix."""
    log_p = (_tempered(logits, temperature) - top[:, None]).sub_(log_total[:, None])
    p = log_p.exp()
    if by_entropy is not None:
        slope = log_p.add_(entropy[:, None]).mul_(-by_entropy[:, None])
        if by_log_prob is not None:
            slope -= by_log_prob[:, None]
        gradient = p.mul_(slope)
    else:
        assert by_log_prob is not None
        gradient = p.mul_(-by_log_prob[:, None])
    if by_log_prob is not None:
        gradient.scatter_add_(1, places[:, None], torch.where(here, by_log_prob, 0.0)[:, None])
    if scale != temperature:
        gradient.mul_(scale / temperature)
    if softcap is not None:
        gradient.mul_(1.0 - (logits.to(gradient.dtype) / softcap).square())
    return gradient


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
    """Return the logits [n, V] before the division by the temperature."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if options.scale != 1.0:
        logits.mul_(options.scale)
    if options.softcap is not None:
        logits.div_(options.softcap).tanh_().mul_(options.softcap)
    return logits


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(_wide(logits.dtype))
    return wide / temperature if temperature != 1.0 else wide


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the dot products [n] of the rows of two [n, V]; on a device ``left`` is used up.

    A device multiplies single rows at a fifth of its memory's bandwidth (32 ms of an update of 18,000 tokens).
    """
    if left.device.type != "cpu":
        return left.mul_(right).sum(dim=-1)
    return torch.bmm(left.unsqueeze(1), right.unsqueeze(2)).flatten()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parts(tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _blocks(logits: Tensor, options: _Options) -> Iterator[slice]:
    """Yield blocks of a chunk's rows that fit into the CPU's cache, for several elementwise passes over each."""
    tokens, vocabulary = logits.shape
    yield from _parts(tokens, max(1, _BLOCK_BYTES // (4 * vocabulary)) if options.on_cpu else tokens)


_BLOCK_BYTES = 2**20


def _by_function(
    hidden: Tensor,
    targets: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    *,
    extras: Extras,
    temperature: float,
    chunk: int,
) -> TokenScores:

    def score(part: Tensor, wanted: Tensor) -> TokenScores:
        logits = logits_of(part)
        log_probs, entropy = log_probs_and_entropy(logits, wanted, temperature=temperature)
        nothing = log_probs.new_zeros(0)
        correct = nothing
        if extras == "correct":
            correct = (logits.argmax(dim=-1) == wanted).to(log_probs.dtype)
        if extras == "entropy":
            entropy = entropy.detach()
        return TokenScores(log_probs, entropy if extras in ("entropy", "entropy_gradient") else nothing, correct)

    if len(targets) <= chunk:
        return score(hidden, targets)
    parts: list[TokenScores] = []
    for part, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        if torch.is_grad_enabled():
            parts.append(TokenScores(*checkpoint(score, part, wanted, use_reentrant=False, preserve_rng_state=False)))
        else:
            parts.append(score(part, wanted))
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))
