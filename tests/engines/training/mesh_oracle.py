"""Random configurations of the trainer, each computed on a mesh of ranks and by one rank alone.

A case trains a tiny model for three updates. On the way its tensors are published, exported and saved, and the last
update is made from the checkpoint, on another mesh as a rule. :func:`differences` compares what a mesh did with what
one rank did. Ranks serve any number of cases, one after another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from asyncrl.algorithms import CISPO, GSPO, PPO, SAPO, TOPR, PolicyObjective, ValueObjective
from asyncrl.data import DataProto

FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,
    "granite": GraniteConfig,
    "cohere": CohereConfig,
}
LOSSES: dict[str, Any] = {"ppo": PPO, "gspo": GSPO, "cispo": CISPO, "sapo": SAPO, "topr": TOPR}
MESHES: dict[int, tuple[dict[str, int], ...]] = {
    2: (
        {"dp_shard": 2},
        {"dp_replicate": 2},
        {"cp": 2},
        {"tp": 2},
        {"dp_shard": 2, "ep": 2},
        {"cp": 2, "ep": 2},
        {"pp": 2},
    ),
    4: (
        {"dp_shard": 4},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 2, "cp": 2},
        {"dp_replicate": 2, "cp": 2},
        {"dp_shard": 2, "tp": 2},
        {"dp_replicate": 2, "tp": 2},
        {"cp": 2, "tp": 2},
        {"cp": 4},
        {"tp": 4},
        {"dp_shard": 4, "ep": 2},
        {"dp_shard": 4, "ep": 4},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"dp_shard": 2, "cp": 2, "ep": 2},
        {"dp_shard": 2, "cp": 2, "ep": 4},
        {"pp": 2, "dp_shard": 2},
        {"pp": 2, "dp_replicate": 2},
        {"pp": 4},
        {"pp": 2, "tp": 2},
        {"pp": 2, "cp": 2},
        {"pp": 2, "dp_shard": 2, "ep": 2},
    ),
}
VOCABULARY = 64
DEADLINE_S = 120.0


def _foreign(family: str) -> set[str]:
    """The dimensions that a family does not have."""
    return {"tp"} if family == "qwen3_moe" else {"ep", "pp"} if family == "granite" else {"ep"}


TOLERANCES = {"float32": (1e-4, 1e-2, 2e-3), "bfloat16": (0.1, 0.1, 0.3)}
"""By precision: the largest relative difference of a metric or score, what counts as one that is smaller (a loss is a
sum of both signs), and the largest difference of the weights over the way they went."""


@dataclass(frozen=True)
class Case:
    seed: int
    ranks: int
    mesh: dict[str, int]
    resumed: dict[str, int]  # the mesh that goes on from the checkpoint
    family: str = "llama"
    tied: bool = True
    kv_heads: int = 4
    task: str = "policy"  # or supervised, critic
    loss: str = "ppo"
    loss_agg_mode: str = "token_mean"
    entropy_coef: float = 0.0
    whiten: bool = False
    prompt: int = 0  # tokens that the rows of a group begin with; 0: rows have nothing in common
    layout: str = "auto"
    experts: int = 4
    crowded: bool = False  # all tokens have the same two experts of a mixture, the others have none
    stages_per_rank: int = 1  # the models have four layers where some are divided
    max_tokens: int = 24
    num_mini_batches: int = 1
    checkpointing: bool = False
    lora: bool = False
    dtype: str = "float32"
    temperature: float = 1.0
    compile: str | bool = False  # of the mesh; one rank computes without

    @staticmethod
    def draw(seed: int) -> Case:
        draw = random.Random(seed)
        ranks = draw.choice((2, 2, 4))
        mesh = dict(draw.choice(MESHES[ranks]))
        family = draw.choice([name for name in FAMILIES if not _foreign(name) & mesh.keys()])
        task = draw.choices(("policy", "supervised", "critic"), (6, 1, 2))[0]
        usable = [each for each in MESHES[ranks] if not _foreign(family) & each.keys()]
        lora = task == "policy" and draw.random() < 0.15
        rounds = draw.random() < 0.15 and family != "granite"  # whose multipliers make chaos of rounding
        dtype = "bfloat16" if rounds else "float32"
        padded = not mesh.keys() & {"cp", "pp"} and draw.random() < 0.15
        tied = "pp" not in mesh and draw.random() < 0.5
        if padded:
            usable = [each for each in usable if "cp" not in each]
        if padded or tied:
            usable = [each for each in usable if "pp" not in each]
        return Case(
            seed=seed,
            ranks=ranks,
            mesh=mesh,
            resumed=dict(draw.choice(usable)),
            family=family,
            tied=tied,
            kv_heads=4 if mesh.get("tp") == 4 else draw.choice((2, 4)),
            task=task,
            loss=draw.choice(sorted(LOSSES)),
            loss_agg_mode=draw.choice(("token_mean", "sequence_mean")),
            entropy_coef=draw.choice((0.0, 0.0, 0.05)),
            whiten=draw.random() < 0.3,
            prompt=draw.choice((0, 0, 11, 30)),
            # In half precision the one expert of a token is often another where it is computed beside others.
            experts=2 if mesh == {"dp_shard": 4, "ep": 2} and dtype == "float32" else 4,
            crowded=family == "qwen3_moe" and draw.random() < 0.25,
            layout="padded" if padded else "auto",
            max_tokens=draw.choice((24, 64, 4096)),
            num_mini_batches=draw.choice((1, 1, 2)),
            checkpointing=draw.random() < 0.25,
            stages_per_rank=draw.choice((1, 2)) if mesh.get("pp") == 2 else 1,
            lora=lora,
            dtype=dtype,
            temperature=draw.choice((1.0, 1.0, 0.7)),
        )._usable_from_checkpoint()

    def _usable_from_checkpoint(self) -> Case:
        if (self.resumed.get("tp") == 4 and self.kv_heads == 2) or self.resumed.get("ep", 1) > self.experts:
            return dataclasses.replace(self, resumed=self.mesh)
        return self

    def batch(self, step: int) -> DataProto:
        """Rows of groups of four; the last group is smaller, and one row has nothing to train."""
        draw = torch.Generator().manual_seed(1000 * self.seed + step)
        lengths = [9, 4, 17, 6, 6, 12, 3, 14, 5, 21]
        prompts = [torch.randint(0, VOCABULARY, (self.prompt,), generator=draw) for _ in range(3)]
        ids, masks = [], []
        for row, length in enumerate(lengths):
            answer = torch.randint(0, VOCABULARY, (length,), generator=draw)
            ids.append(torch.cat([prompts[row // 4], answer]))
            masks.append(torch.arange(self.prompt + length) >= self.prompt + 3)
        sampled = [-4.0 + torch.rand(len(mask), generator=draw) for mask in masks]
        return DataProto.from_dict(
            tensors={
                "input_ids": ids,
                "loss_mask": masks,
                "behaviour_log_probs": [
                    torch.where(mask, each, 0.0) for mask, each in zip(masks, sampled, strict=True)
                ],
                "returns": [torch.randn(len(mask), generator=draw) for mask in masks],
                "advantages": torch.randn(len(lengths), generator=draw),
            }
        )

    @property
    def layers(self) -> int:
        return 4 if "pp" in {**self.mesh, **self.resumed} else 2

    def model(self, folder: Path) -> str:
        """The folder of the model, which is made if it is not there; its distributions are not flat."""
        made = folder / f"{self.family}-{self.tied}-{self.kv_heads}-{self.experts}-{self.crowded}-{self.layers}"
        if not made.exists():
            sizes: dict[str, Any] = {
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": self.layers,
                "num_attention_heads": 4,
                "num_key_value_heads": self.kv_heads,
                "head_dim": 8,
                "initializer_range": 0.2,
                "tie_word_embeddings": self.tied,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
            if self.family in ("mistral", "gemma2"):
                sizes["sliding_window"] = 9
            if self.family == "qwen3_moe":
                sizes |= {
                    "num_experts": self.experts,
                    "num_experts_per_tok": self.experts // 2,
                    "moe_intermediate_size": 16,
                }
            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = AutoModelForCausalLM.from_config(FAMILIES[self.family](**sizes))
                with torch.no_grad():  # norms and biases that differ from one another, as trained ones do
                    for parameter in model.parameters():
                        if parameter.ndim == 1:
                            parameter.add_(0.1 * torch.randn(parameter.shape))
                    for name, parameter in model.named_parameters() if self.crowded else ():
                        if name.endswith("embed_tokens.weight"):
                            parameter[:, 0] = 2.0
                        if name.endswith("mlp.gate.weight"):
                            parameter[:, 0] = torch.tensor([4.0, 4.0, -4.0, -4.0])[:: 4 // self.experts]
                model.save_pretrained(made)
        return str(made)


class Rank:
    """One rank of several, or the only one."""

    def __init__(self, folder: Path, *, rank: int = 0, world_size: int = 1, port: int | None = None) -> None:
        self.folder = folder
        self.rank = rank
        self.world_size = world_size
        self.port = port

    def play(self, case: Case, *, work: Path) -> dict[str, Any]:
        """What a case leads to; rank 0 leaves the last weights in ``work``, beside a checkpoint and an export."""
        engine = self._engine(case, case.mesh)
        batches = [case.batch(step) for step in range(4)]
        loaded = digest(dict(engine._full_tensors()))
        metrics = [self._update(case, engine, batch) for batch in batches[:2]]
        saved = digest(dict(engine._full_tensors()))
        engine.export(work / "export")
        engine.save(work / "checkpoint")
        snapshot = engine.snapshot()
        scores = self._scores(case, engine, batches[3])
        self._update(case, engine, batches[3])
        (work / "snapshot").mkdir(parents=True, exist_ok=True)
        written = snapshot.write(work / "snapshot")
        late = {
            name: (work / "snapshot" / name).read_bytes() == (work / "checkpoint" / name).read_bytes()
            for name in written
        }
        engine.close()
        engine = self._engine(case, case.resumed)
        engine.load(work / "checkpoint")
        resumed = digest(dict(engine._full_tensors()))
        metrics.append(self._update(case, engine, batches[2]))
        weights = {name: tensor.clone().contiguous() for name, tensor in engine._full_tensors()}
        engine.close()
        if self.rank == 0:
            save_file(weights, work / "weights.safetensors")
        digests = {"loaded": loaded, "saved": saved, "resumed": resumed, "weights": digest(weights)}
        return {"metrics": metrics, "digests": digests, "scores": scores, "late": late}

    def _engine(self, case: Case, mesh: Mapping[str, int]) -> Any:
        from engines.training.fsdp_engine import FSDPEngine
        from engines.training.value_engine import FSDPValueEngine

        # A large epsilon keeps Adam from magnifying the rounding of gradients that are nearly 0.
        settings: dict[str, Any] = {
            "lr": 1e-2,
            "eps": 1e-3,
            "max_grad_norm": 0.5,
            "weight_decay": 0.1,
            "device": "cpu",
            "dtype": case.dtype,
            "layout": case.layout,
            "max_tokens_per_microbatch": case.max_tokens,
            "num_mini_batches": case.num_mini_batches,
            "gradient_checkpointing": case.checkpointing,
            "compile": case.compile if self.world_size > 1 else False,
            "rank": self.rank,
            "world_size": self.world_size,
            "master_port": self.port,
            "mesh": mesh if self.world_size > 1 else None,
            "stages_per_rank": case.stages_per_rank if self.world_size > 1 and "pp" in mesh else 1,
            "collective_timeout_s": DEADLINE_S / 2,
        }
        if case.task == "critic":
            return FSDPValueEngine(case.model(self.folder), objective=ValueObjective(cliprange_value=None), **settings)
        objective = PolicyObjective(
            loss=LOSSES[case.loss](),
            loss_agg_mode=case.loss_agg_mode,
            entropy_coef=case.entropy_coef,
            whiten_advantages=case.whiten,
        )
        targets = {"target_modules": ["q_proj", "v_proj"]} if case.family == "qwen3_moe" else {}
        lora = {"rank": 2, "alpha": 4.0, **targets} if case.lora else None
        return FSDPEngine(
            case.model(self.folder), objective=objective, lora=lora, temperature=case.temperature, **settings
        )

    def _rows(self, engine: Any, batch: DataProto) -> DataProto:
        """This rank's share; the first data rank has more than the others, and of four the third has none."""
        size, data_rank = engine._ranks.data_size, engine._ranks.data_rank
        cuts = {1: [0, 10], 2: [0, 7, 10], 4: [0, 4, 7, 7, 10]}[size]
        return batch[cuts[data_rank] : cuts[data_rank + 1]]

    def _update(self, case: Case, engine: Any, batch: DataProto) -> dict[str, float]:
        update = engine.supervise if case.task == "supervised" else engine.update
        return dict(update(self._rows(engine, batch)))

    def _scores(self, case: Case, engine: Any, batch: DataProto) -> list[list[float]]:
        rows = self._rows(engine, batch)
        found = (engine.values if case.task == "critic" else engine.log_probs)(rows).batch
        return [found[name].values().tolist() for name in sorted(found.keys())]


def digest(tensors: Mapping[str, Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    from engines.training.checkpoint import SavedTensors  # here: defects are planted before the engines are imported

    saved = SavedTensors(folder)
    return dict(saved.full(saved.specs.values()))


# ----------------------------------------------------------------------------------------------------------- the oracle


def differences(
    case: Case, *, one: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], alone: Path, work: Path
) -> list[str]:
    """What a mesh did otherwise than one rank: the outcomes, and the folders that they left."""
    found: list[str] = []

    def check(holds: bool, what: str) -> None:
        if not holds:
            found.append(what)

    metric_limit, least, way_limit = TOLERANCES[case.dtype]
    first = ranks[0]
    for rank, each in enumerate(ranks):
        check(each["metrics"] == first["metrics"], f"rank {rank} has other metrics than rank 0")
        check(each["digests"] == first["digests"], f"rank {rank} gathers other weights than rank 0")
        check(all(each["late"].values()), f"rank {rank} wrote another snapshot than it took: {each['late']}")
    digests = first["digests"]
    check(digests["loaded"] == one["digests"]["loaded"], "other weights were read")
    check(digests["saved"] == digests["resumed"], "the checkpoint is not what was saved")
    exported = load_file(work / "export" / "model.safetensors")
    check(digest(exported) == digests["saved"], "the export is not what is published")
    for mine, its in zip(first["metrics"], one["metrics"], strict=True):
        check(mine.keys() == its.keys(), f"metrics are {sorted(mine)}, of one rank {sorted(its)}")
        for name, value in its.items():
            off = abs(mine.get(name, float("nan")) - value)
            counted = case.dtype == "bfloat16" and name.endswith("_fraction")  # rounding moves some over the limit
            limit = metric_limit * (1.0 if counted else max(abs(value), least))
            check(off <= limit, f"{name} is {mine.get(name)}, of one rank {value}")
    copies = case.mesh.get("cp", 1) * case.mesh.get("tp", 1)
    for place, expected in enumerate(one["scores"]):
        answers = ranks[: len(ranks) // case.mesh.get("pp", 1) : copies]
        scores = [score for rank in answers for score in rank["scores"][place]]
        each = [abs(mine - its) for mine, its in zip(scores, expected, strict=True)]
        off = float(torch.tensor(each).max()) / 4 if case.dtype == "float32" else statistics.fmean(each)
        check(off <= metric_limit, f"scores are off by {off:.1e}")
    start = load_file(alone / "start.safetensors")
    for name, read in (("weights.safetensors", load_file), ("checkpoint", saved_tensors)):
        mine, its = read(work / name), read(alone / name)
        check(mine.keys() == its.keys(), f"{name} has other tensors")
        for tensor, expected in its.items():
            scale = (expected - start[tensor]).norm() if tensor in start else expected.norm()
            off = float((mine[tensor] - expected).norm() / max(float(scale), 1e-6))
            check(off <= way_limit, f"{tensor} is off by {off:.1e}")
    return found


def serve(orders: Connection, rank: int, ranks: int, port: int, folder: Path, prepare: Callable[[], None]) -> None:
    """Answer cases, one after another, in a process of its own; ``prepare`` is called before the engines are imported.

    Raises nothing: an error is an answer. What libraries print is in the file ``rank-RANK.log``.
    """
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    prepare()
    this = Rank(folder, rank=rank, world_size=ranks, port=port)
    while True:
        try:
            case, work = orders.recv()
        except EOFError:
            return
        try:
            answer = this.play(case, work=work)
        except Exception as error:  # noqa: BLE001  the parent judges it
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        orders.send(answer)


def as_it_is() -> None:
    """Prepare nothing."""


class Oracle:
    """Ranks that serve cases, and the outcomes of one rank; a context manager. ``prepare`` is that of :func:`serve`."""

    def __init__(self, folder: Path, *, prepare: Callable[[], None] = as_it_is) -> None:
        self.folder = folder
        self._prepare = prepare
        self._ranks: dict[int, list[tuple[BaseProcess, Connection]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for ranks in list(self._ranks):
            self._end(ranks)

    def judge(self, case: Case) -> list[str]:
        """The differences of a case from one rank; an error of a rank is one."""
        alone, work = self.one_rank(case), Path(tempfile.mkdtemp(dir=self.folder))
        outcomes = self._outcomes(case, work)
        try:
            for rank, outcome in enumerate(outcomes):
                if outcome is None:
                    return [f"rank {rank} did not answer"]
                if "error" in outcome:
                    return [f"rank {rank}: {outcome['error']}"]
            one = json.loads((alone / "outcome.json").read_text())
            return differences(case, one=one, ranks=outcomes, alone=alone, work=work)
        finally:
            shutil.rmtree(work)

    def one_rank(self, case: Case) -> Path:
        """The folder of what one rank does, in this process, at the first call for a case."""
        folder = self.folder / f"alone-{case.seed}"
        if not (folder / "outcome.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            rank = Rank(self.folder)
            engine = rank._engine(case, {})
            save_file({name: each.clone() for name, each in engine._full_tensors()}, folder / "start.safetensors")
            engine.close()
            outcome = rank.play(case, work=folder)
            (folder / "outcome.json").write_text(json.dumps(outcome))
        return folder

    def _outcomes(self, case: Case, work: Path) -> list[Any]:
        if case.ranks not in self._ranks:
            self._ranks[case.ranks] = self._started(case.ranks)
        ranks = self._ranks[case.ranks]
        for _, orders in ranks:
            orders.send((case, work))
        outcomes = [_answer(orders) for _, orders in ranks]
        if any(outcome is None or "error" in outcome for outcome in outcomes):  # they may be out of step
            self._end(case.ranks)
        return outcomes

    def _started(self, ranks: int) -> list[tuple[BaseProcess, Connection]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = []
        for rank in range(ranks):
            mine, its = _CONTEXT.Pipe()
            arguments = (its, rank, ranks, port, self.folder, self._prepare)
            process = _CONTEXT.Process(target=serve, args=arguments, daemon=True)
            process.start()
            its.close()
            started.append((process, mine))
        return started

    def _end(self, ranks: int) -> None:
        for process, orders in self._ranks.pop(ranks):
            process.kill()
            process.join()
            orders.close()


def _answer(orders: Connection) -> Any:
    try:
        return orders.recv() if orders.poll(DEADLINE_S) else None
    except EOFError:
        return None


# Ranks are forked from a process that has imported what takes long, and none of what is tested.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["mesh_oracle", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"])


def judged(cases: Iterable[Case], folder: Path) -> dict[int, list[str]]:
    """The differences of every case that has some, by seed."""
    with Oracle(folder) as oracle:
        return {case.seed: found for case in cases if (found := oracle.judge(case))}
