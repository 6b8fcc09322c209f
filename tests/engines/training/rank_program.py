"""One rank of the tests with several: ``python rank_program.py MODEL DEEP FOLDER RANK PORT RANKS SCENES``.

Every scene writes its metrics to ``FOLDER/SCENE.RANK.json``, weights are left in checkpoints of the same name. The
test runs the very same scenes in its own process with all rows on one rank.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from asyncrl.algorithms import GSPO, ClipCov, PolicyObjective, TokenLosses, TruncatedImportance, ValueObjective
from asyncrl.algorithms.losses import PolicyLoss, PolicyTokens
from asyncrl.data import DataProto
from asyncrl.errors import AsyncRLError, CheckpointError
from engines.training import pipeline
from engines.training.checkpoint import SavedTensors
from engines.training.fsdp_engine import FSDPEngine
from engines.training.value_engine import FSDPValueEngine

LENGTHS = [9, 4, 17, 6, 6, 12, 3, 14]


def trajectories(seed: int) -> DataProto:
    """Rows with a prompt of three tokens; the seventh has nothing to train."""
    draw = torch.Generator().manual_seed(seed)
    mask = [torch.arange(length) >= 3 for length in LENGTHS]
    return DataProto.from_dict(
        tensors={
            "input_ids": [torch.randint(0, 61, (length,), generator=draw) for length in LENGTHS],
            "loss_mask": mask,
            "behaviour_log_probs": [
                torch.where(each, -4.0 + torch.rand(len(each), generator=draw), 0.0) for each in mask
            ],
            "advantages": torch.randn(len(LENGTHS), generator=draw),
        }
    )


class Rank:
    """One rank, and which rows of a batch it holds.

    Of two ranks, the first has ``split`` rows. Of four, the first two share those, and the third has none.
    """

    def __init__(
        self, model: str, deep: str, folder: Path, *, rank: int, port: int | None = None, world_size: int = 1
    ) -> None:
        self.model = model
        self.deep = deep  # of four layers, and with an output head of its own
        self.folder = folder
        self.rank = rank
        self.world_size = world_size
        self.port = port

    def engine(self, *, objective: PolicyObjective | None = None, **options: Any) -> FSDPEngine:
        # A large epsilon keeps Adam from magnifying the rounding of gradients that are nearly 0.
        settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "threads": 1, "device": "cpu"} | options
        return FSDPEngine(
            self.model,
            objective=objective or PolicyObjective(),
            rank=self.rank,
            world_size=self.world_size,
            master_port=self.port,
            collective_timeout_s=60.0,
            **settings,
        )

    def value_engine(self, **options: Any) -> FSDPValueEngine:
        settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "threads": 1, "device": "cpu"} | options
        return FSDPValueEngine(
            self.model,
            rank=self.rank,
            world_size=self.world_size,
            master_port=self.port,
            collective_timeout_s=60.0,
            **settings,
        )

    def rows(self, seed: int, *, split: int, copies: int = 1) -> DataProto:
        batch = trajectories(seed)
        rows = len(batch)
        ranks, rank = max(1, self.world_size // copies), self.rank // copies
        cuts = {1: [0, rows], 2: [0, split, rows], 4: [0, split // 2, split, split, rows]}[ranks]
        return batch[cuts[rank] : cuts[rank + 1]]

    def report(self, scene: str, value: Any) -> None:
        (self.folder / f"{scene}.{self.rank}.json").write_text(json.dumps(value))

    def updates(self, scene: str, *, split: int, objective: PolicyObjective | None = None, **options: Any) -> None:
        """Three updates, then a checkpoint."""
        engine = self.engine(objective=objective, **options)
        computed = _watched(engine)
        copies = self.world_size // engine._ranks.data_size
        self.report(scene, [engine.update(self.rows(seed, split=split, copies=copies)) for seed in range(3)])
        self.report(f"{scene}.computed", computed)
        engine.save(self.folder / scene)
        engine.close()


class Reinforce(PolicyLoss):
    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        return TokenLosses(loss=-tokens.advantages * tokens.current)


class DividesByZero(Reinforce):
    """Fails from its second micro-batch on."""

    calls = itertools.count(1)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        if next(self.calls) >= 2:
            raise ZeroDivisionError("the user's loss divides by 0")
        return super().__call__(tokens)


def _watched(engine: FSDPEngine) -> list[int]:
    """Grows by the scored tokens of every stream that the engine computes."""
    computed: list[int] = []
    engine._model.register_forward_pre_hook(lambda _, inputs: computed.append(len(inputs[3])))
    return computed


def uneven(rank: Rank) -> None:
    """Five rows here, three there; micro-batches of 20 tokens."""
    rank.updates("uneven", split=5, max_tokens_per_microbatch=20)


def empty(rank: Rank) -> None:
    """Everything on rank 0."""
    rank.updates("empty", split=8)


def by_row(rank: Rank) -> None:
    """Rows count the same, entropy is rewarded, activations are computed twice."""
    objective = PolicyObjective(loss_agg_mode="sequence_mean", entropy_coef=0.05)
    rank.updates("by_row", split=2, objective=objective, gradient_checkpointing=True, weight_decay=0.1)


def num_mini_batches(rank: Rank) -> None:
    """Several optimizer steps per update; their rows must not depend on the ranks that hold them."""
    rank.updates("num_mini_batches", split=3, num_mini_batches=3, epochs=2, max_tokens_per_microbatch=30)


def whole_batch(rank: Rank) -> None:
    """The tokens that are clipped depend on all ranks' tokens, and are drawn at random."""
    objective = PolicyObjective(loss=ClipCov(share=0.3, low=-0.2))
    rank.updates("whole_batch", split=3, objective=objective, num_mini_batches=2, max_tokens_per_microbatch=20)


def whole_rows(rank: Rank) -> None:
    """Ratios and weights of whole rows."""
    objective = PolicyObjective(
        loss=GSPO(clip_ratio_low=0.2, clip_ratio_high=0.2),
        correction=TruncatedImportance(cap=3.0, level="sequence"),
        loss_agg_mode="sequence_mean",
    )
    rank.updates("whole_rows", split=6, objective=objective, num_mini_batches=2, max_tokens_per_microbatch=20)


def whitened(rank: Rank) -> None:
    """Mean and variance of advantages are those of all ranks' tokens."""
    rank.updates("whitened", split=5, objective=PolicyObjective(whiten_advantages=True))


def meshed(rank: Rank) -> None:
    """Copies of the model; pieces of each row; parts of each product; a layer for each rank."""
    for name in ("dp_replicate", "cp", "tp", "pp"):
        mesh = {name: 2} if rank.world_size == 2 else None
        objective = PolicyObjective(entropy_coef=0.05)
        whole, rank.model = rank.model, rank.deep if name == "pp" else rank.model
        rank.updates(f"mesh_{name}", split=5, max_tokens_per_microbatch=30, objective=objective, mesh=mesh)
        rank.model = whole


@patch.object(pipeline, "WINDOW", 2)  # one rank plays this in the process of other tests
def staged(rank: Rank) -> None:
    """Adapters and reference in interleaved stages, more micro-batches than a schedule has, and a loss that fails.

    The scene's model has four layers; its loss fails on the rank that computes it, the last one.
    """
    whole, rank.model = rank.model, rank.deep
    stages = {"mesh": {"pp": 2}, "stages_per_rank": 2} if rank.world_size == 2 else {}
    options: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0}, "max_tokens_per_microbatch": 9, **stages}
    rank.updates("staged", split=5, **options)
    engine = rank.engine(**options)
    engine.load(rank.folder / "staged")
    scores = engine.reference_log_probs(rank.rows(0, split=7, copies=rank.world_size)).batch
    assert scores is not None
    rank.report("staged.reference", scores["log_probs"].values().tolist())
    for name, tensors in (("adapters", engine.adapter_tensors()), ("base", engine.base_tensors())):
        save_file({each: tensor.clone() for each, tensor in tensors}, rank.folder / f"staged.{name}.{rank.rank}")
    engine.sleep()
    engine.wake()
    rank.report(
        "staged.woken",
        engine.log_probs(rank.rows(0, split=7, copies=rank.world_size)).batch["log_probs"].values().tolist(),
    )
    engine.close()
    failing = rank.engine(objective=PolicyObjective(loss=DividesByZero()), **options)
    try:
        failing.update(rank.rows(0, split=5, copies=rank.world_size))
    except (AsyncRLError, ZeroDivisionError) as error:
        rank.report("staged.failed", f"{type(error).__name__}: {error}")
    failing.close()
    rank.model = whole


def optimizers(rank: Rank) -> None:
    """One that is elementwise, on shards; those that need whole matrices, on copies, and refused on shards."""
    rank.updates("sgd", split=5, optimizer="sgd", optimizer_options={"momentum": 0.9})
    for name in ("muon", "adafactor"):
        mesh = {"dp_replicate": 2} if rank.world_size == 2 else None
        rank.updates(name, split=5, optimizer=name, mesh=mesh, weight_decay=0.1)
    if rank.world_size == 2:
        try:
            rank.engine(optimizer="muon")
        except AsyncRLError as error:
            rank.report("undivided", f"{type(error).__name__}: {error}")


def quantised(rank: Rank) -> None:
    """Frozen weights of 8 bits; their codes are compared, too."""
    rank.updates("quantised", split=5, lora={"rank": 4, "alpha": 8.0, "base": "int8"})


def critic(rank: Rank) -> None:
    """Values of single tokens, a clip around those of the start."""
    engine = rank.value_engine(num_mini_batches=2, objective=ValueObjective(cliprange_value=0.01))
    batches = [rank.rows(seed, split=5) for seed in range(3)]
    updates = [engine.update(batch.with_columns(returns=batch.batch["behaviour_log_probs"])) for batch in batches]
    for metrics in updates:  # 1 minus a ratio near 1 has fewer significant digits
        metrics["explained_variance"] = round(metrics["explained_variance"], 4)
    rank.report("critic", updates)
    rank.report("critic.values", engine.values(rank.rows(3, split=7)).batch["values"].values().tolist())
    engine.save(rank.folder / "critic")
    engine.close()


def compared(rank: Rank) -> None:
    """The second pair has one row here and the other there."""
    engine = rank.value_engine(center_rewards_coefficient=0.1)
    rank.report("compared", [engine.compare(rank.rows(seed, split=3)) for seed in range(3)])
    engine.save(rank.folder / "compared")
    engine.close()


def supervised(rank: Rank) -> None:
    engine = rank.engine()
    rank.report("supervised", [engine.supervise(rank.rows(seed, split=7)) for seed in range(3)])
    engine.save(rank.folder / "supervised")
    engine.close()


def scored(rank: Rank) -> None:
    """Log-probs of each rank's own rows; rank 1 has far fewer micro-batches."""
    engine = rank.engine(max_tokens_per_microbatch=18)
    batch = engine.log_probs(rank.rows(0, split=7)).batch
    assert batch is not None
    rank.report("scored", {name: batch[name].values().tolist() for name in ("log_probs", "entropy")})
    engine.close()


def resumed(rank: Rank) -> None:
    """Load what one rank alone saved, save again; then go on twice from there, bit for bit the same."""
    engine = rank.engine(num_mini_batches=2)
    engine.prepare_snapshots()
    prepared = dict(engine._memory.tensors)
    engine.log_probs(rank.rows(0, split=4))  # what is gathered for this must not outlive the load
    engine.load(rank.folder / "from_one_rank")
    engine.save(rank.folder / "resharded")
    engine.export(rank.folder / "exported_first")
    early, snapshot = engine.snapshot(), engine.snapshot()
    used = [prepared.get(name) is shard for name, shard in snapshot.shards.items()]
    rank.report("prepared", len(used) == len(prepared) and all(used))
    first = [engine.update(rank.rows(seed, split=4)) for seed in (5, 6)]
    (rank.folder / "snapshot").mkdir(exist_ok=True)
    snapshot.write(rank.folder / "snapshot")
    try:
        early.write(rank.folder / "early")
    except AsyncRLError as error:
        rank.report("superseded", f"{type(error).__name__}: {error}")
    engine.save(rank.folder / "went_on_first")
    engine.load(rank.folder / "resharded")
    second = [engine.update(rank.rows(seed, split=4)) for seed in (5, 6)]
    engine.save(rank.folder / "went_on_second")
    if rank.rank == 0:  # both have written before they saved together
        snapshot.export(rank.folder / "snapshot", rank.folder / "exported_late")
    rank.report("resumed", [first, second])
    rank.report("published", {name: list(tensor.shape) for name, tensor in engine.named_tensors()})
    engine.export(rank.folder / "exported")
    engine.close()


def errors(rank: Rank) -> None:
    """An error on one rank is raised on both, and the group continues."""
    engine, twin = rank.engine(), rank.engine()
    said: list[str] = []

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except (AsyncRLError, OSError, ZeroDivisionError) as error:
            said.append(f"{type(error).__name__}: {error}")

    batch = rank.rows(0, split=4)
    unusable = [torch.ones(length, dtype=torch.bool) for length in LENGTHS[4:]]
    attempt(lambda: engine.update(batch if rank.rank == 0 else batch.with_columns(loss_mask=unusable)))
    zeros = [torch.zeros(length) for length in LENGTHS[4:]]
    attempt(lambda: engine.update(batch if rank.rank == 0 else batch.with_columns(proximal_log_probs=zeros)))
    nan = torch.full((4,), torch.nan)
    attempt(lambda: engine.update(batch if rank.rank == 0 else batch.with_columns(advantages=nan)))
    attempt(lambda: engine.save(rank.folder / "in_the_way" / "checkpoint"))
    attempt(lambda: engine.load(rank.folder / "nowhere"))
    loss = DividesByZero() if rank.rank == 1 else Reinforce()
    failing = rank.engine(objective=PolicyObjective(loss=loss), max_tokens_per_microbatch=20)
    begun_s = time.monotonic()
    attempt(lambda: failing.update(batch))
    said.append(str(time.monotonic() - begun_s < 30))
    failing.save(rank.folder / "whole")
    gone = CheckpointError("gone") if rank.rank == 1 else None
    with patch.object(SavedTensors, "read", side_effect=gone):
        attempt(lambda: failing.load(rank.folder / "whole"))
    attempt(lambda: failing.export(rank.folder / "mixture"))
    failing.load(rank.folder / "whole")
    failing.export(rank.folder / "whole_again")
    failing.close()
    values = rank.value_engine()
    attempt(lambda: values.compare(batch if rank.rank == 0 else batch.with_columns(margins=torch.zeros(4))))
    values.close()
    rank.report("errors", {"said": said, "goes_on": engine.update(batch) == twin.update(batch)})
    engine.close()
    twin.close()


def loaded(rank: Rank) -> None:
    """Each rank reads its own shards; then rank 1 has a damaged file, which nobody waits for."""
    before = rank.engine()
    before.save(rank.folder / "loaded")
    before.close()
    model, whole = rank.folder / f"damaged.{rank.rank}", Path(rank.model)
    model.mkdir()
    for path in whole.iterdir():
        content = path.read_bytes()
        cut = rank.rank == 1 and path.name == "model.safetensors"
        (model / path.name).write_bytes(content[:-10] if cut else content)
    rank.model = str(model)
    try:
        rank.engine()
    except AsyncRLError as error:
        rank.report("loaded", f"{type(error).__name__}: {error}")
    rank.model = str(whole)


SHARED_SCENES = (
    uneven,
    empty,
    by_row,
    num_mini_batches,
    whole_batch,
    whole_rows,
    whitened,
    meshed,
    staged,
    optimizers,
    quantised,
    critic,
    compared,
    supervised,
    scored,
)
"""Scenes with the same outcome on any number of ranks."""

SCENES = {scene.__name__: scene for scene in (*SHARED_SCENES, resumed, errors, loaded)}


if __name__ == "__main__":
    _, model, deep, folder, rank, port, ranks, *names = sys.argv
    this = Rank(model, deep, Path(folder), rank=int(rank), port=int(port), world_size=int(ranks))
    for name in names:
        SCENES[name](this)
