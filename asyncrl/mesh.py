"""The mesh of a trainer's ranks: its dimensions, and which models can be divided over them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from asyncrl.errors import ConfigError

TP_STYLES = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce"})
"""Entries of a transformers tensor-parallel plan that the trainer carries out."""

EXPERTS_STYLE = "ep_dispatch_experts"
"""Entry of a transformers expert-parallel plan: a module whose tensors have an expert a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """The sizes of a mesh's dimensions, outermost first: ranks that follow one another differ in ``tp``.

    Attributes:
        pp: ranks that the layers are divided over, which have the same rows.
        dp_replicate: copies of the model, each on ranks of its own; their gradients are summed.
        dp_shard: ranks that rows and weights are divided over.
        cp: ranks that the tokens of a row are divided over, and weights too.
        tp: ranks that heads, features and vocabulary are divided over.
        ep: of the ``dp_shard * cp`` ranks of a copy, which have different tokens, those that follow one another and
            that the experts of a layer are divided over; the other dimensions alone make up the number of ranks.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @staticmethod
    def of(options: Mapping[str, int] | MeshShape | None, *, world_size: int) -> MeshShape:
        """Make the mesh of ``world_size`` ranks; ``dp_shard`` is what the other dimensions leave, if it is not given.

        Raises:
            ConfigError: a dimension does not exist, their product is not ``world_size``, or ``ep`` divides no ranks.
        """
        given = asdict(options) if isinstance(options, MeshShape) else dict(options or {})
        names = [field.name for field in fields(MeshShape)]
        for name, size in given.items():
            if name not in names:
                what = f"mesh.{name}: there is no such dimension"
                raise ConfigError(what, path=f"mesh.{name}", remedy=f"use {', '.join(names)}")
            if size < 1:
                raise ConfigError(f"mesh.{name} is {size}", path=f"mesh.{name}", remedy="at least 1")
        others = math.prod(size for name, size in given.items() if name not in ("dp_shard", "ep"))
        shape = MeshShape(**({"dp_shard": max(1, world_size // others)} | given))
        factors = {name: size for name, size in asdict(shape).items() if name != "ep"}
        if (product := math.prod(factors.values())) != world_size:
            sizes = " * ".join(f"{name} {size}" for name, size in factors.items() if size > 1) or "1"
            remedy = f"sizes whose product is world_size = {world_size}, or world_size = {product}"
            raise ConfigError(f"mesh: {sizes} is {product} ranks, there are {world_size}", path="mesh", remedy=remedy)
        if (tokens := shape.dp_shard * shape.cp) % shape.ep:
            raise ConfigError(
                f"mesh.ep = {shape.ep} does not divide the {tokens} ranks of dp_shard * cp, whose tokens differ",
                path="mesh.ep",
                remedy=f"use a divisor of {tokens}",
            )
        return shape

    @property
    def ranks(self) -> int:
        return self.pp * self.data_size * self.copies

    @property
    def copies(self) -> int:
        """The number of ranks, one after another, that have the same rows and layers."""
        return self.cp * self.tp

    @property
    def data_size(self) -> int:
        """The number of ranks that rows are divided over."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        return rank // self.copies % self.data_size

    def answers(self, rank: int) -> bool:
        """True for the first of the ranks that have the same rows: the results of a call are those that it returns."""
        return rank == self.data_rank(rank) * self.copies

    def check_model(self, config: Any, *, path: str = "mesh", own_head: bool = False) -> None:
        """Check that a model can be divided; ``config`` is transformers' (Any: a vendor's), ``path`` the key.

        With ``own_head`` the output head is replaced, as that of a critic is, and shares no tensor.

        Raises:
            ConfigError: it has no tensor- or expert-parallel plan that can be used, a size that does not divide, or
                embeddings that two stages would share.
        """
        text = config.get_text_config()
        heads = int(text.num_attention_heads)
        if self.tp > 1:
            self._check_products(text, heads, f"{path}.tp")
        if self.ep > 1:
            self._check_experts(text, f"{path}.ep")
        if self.pp > 1:
            self._check_layers(
                text, f"{path}.pp", tied=bool(getattr(text, "tie_word_embeddings", False)) and not own_head
            )
        if heads // self.tp % self.cp:
            raise ConfigError(
                f"{path}.cp = {self.cp} does not divide the {heads // self.tp} attention heads of a rank",
                path=f"{path}.cp",
                remedy=f"use a divisor of {heads // self.tp}",
            )

    def _check_layers(self, text: Any, path: str, *, tied: bool) -> None:
        if (layers := int(text.num_hidden_layers)) % self.pp:
            raise ConfigError(
                f"{path} = {self.pp} does not divide the model's {layers} layers",
                path=path,
                remedy=f"use a divisor of {layers}",
            )
        if tied:
            raise ConfigError(
                f"{path} = {self.pp}: the model's embeddings are its head (tie_word_embeddings), the first stage and "
                "the last one would both have them",
                path=path,
                remedy="use pp = 1, or a model whose embeddings and head are two tensors",
            )

    def _check_experts(self, text: Any, path: str) -> None:
        plan: Mapping[str, str] = getattr(text, "base_model_ep_plan", None) or {}
        if EXPERTS_STYLE not in plan.values():
            raise ConfigError(
                f"{path} = {self.ep}: {text.model_type} has no expert-parallel plan in transformers",
                path=path,
                remedy="use ep = 1, or a mixture of experts such as qwen3_moe",
            )
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = next((int(size) for name in names if (size := getattr(text, name, None))), 0)
        if experts % self.ep:
            raise ConfigError(
                f"{path} = {self.ep} does not divide the model's {experts} experts",
                path=path,
                remedy=f"use a divisor of {experts}",
            )

    def _check_products(self, text: Any, heads: int, path: str) -> None:
        plan: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {"": "no entry"}
        if foreign := set(plan.values()) - TP_STYLES:
            raise ConfigError(
                f"{path} = {self.tp}: the tensor-parallel plan of {text.model_type} in transformers has "
                f"{', '.join(sorted(foreign))}, which the trainer cannot carry out",
                path=path,
                remedy="use tp = 1, or a dense family such as llama, qwen2, qwen3, mistral or gemma2",
            )
        sizes = {
            "num_attention_heads": heads,
            "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
            "intermediate_size": int(text.intermediate_size),
            "vocab_size": int(text.vocab_size),
        }
        for name, size in sizes.items():
            if size % self.tp:
                raise ConfigError(
                    f"{path} = {self.tp} does not divide the model's {name}, {size}",
                    path=path,
                    remedy=f"use a divisor of {math.gcd(*sizes.values())}",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of tensors that one rank of a mesh holds when an update holds most.

    Attributes:
        weights: this rank's part of them, frozen ones too, and what the model computes once.
        gradients: of trained weights, summed over micro-batches.
        moments: the optimizer's state.
        gathered: whole weights of what is computed at the moment, and what travels.
        activations: what the layers keep for the backward pass, and use in it.
        head: logits, and what is kept to score tokens.
    """

    shape: MeshShape
    weights: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments + self.gathered + self.activations + self.head

    @property
    def host(self) -> int:
        """Bytes in the host's memory: of a trainer on a GPU that sleeps, or of the copy that a checkpoint is made of.

        Replicas share the copy, of which each has a part. Both are kept for the next time.
        """
        return self.weights + self.moments

    def fitting(self, most: int, planned: Callable[[MeshShape], MemoryPlan], *, most_ranks: int) -> MemoryPlan | None:
        """Return the plan of the nearest mesh whose ranks need ``most`` bytes at most; None if there is none.

        Meshes of as many ranks come first, then those of twice as many and so on; among equals those in which the
        sizes of fewest dimensions change by the smallest factors. ``planned`` makes the plan of a mesh;
        :class:`ConfigError` excludes it. Those are left out whose weights and activations alone are too large if they
        fall with the ranks that they are divided over.
        """

        def least(shape: MeshShape) -> float:
            held = (self.weights + self.gradients + self.moments) * _divided(self.shape) / _divided(shape)
            return held + self.activations * min(1.0, self.shape.copies / shape.copies)

        ranks = self.shape.ranks
        while ranks <= most_ranks:
            for shape in sorted(_meshes_of(ranks, ep=self.shape.ep), key=self._distance):
                if shape == self.shape or least(shape) > most:
                    continue
                try:
                    plan = planned(shape)
                except ConfigError:
                    continue
                if plan.total <= most:
                    return plan
            ranks *= 2
        return None

    def _distance(self, shape: MeshShape) -> tuple[int, float]:
        before, after = asdict(self.shape), asdict(shape)
        factors = [abs(math.log2(after[name] / size)) for name, size in before.items() if after[name] != size]
        return len(factors), sum(factors)


def _divided(shape: MeshShape) -> int:
    return shape.ranks // shape.dp_replicate


def _meshes_of(ranks: int, *, ep: int) -> Iterator[MeshShape]:
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for cp, tp, dp_replicate in itertools.product(sizes, repeat=3):
        if ranks % (tp * cp * dp_replicate) == 0:
            dp_shard = ranks // (tp * cp * dp_replicate)
            if dp_shard * cp % ep == 0:
                yield MeshShape(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)
