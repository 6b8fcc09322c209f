"""Plants defects in sharding, gathering, exchanging and resharding; counts those that the oracle of meshes finds.

    python benchmarks/mesh_defects.py [--only tp] [--most 8] [--json]

Each defect is an edit of one file: the old text must occur once, or the program ends with an error. Ranks with the
edited source play random configurations of ``tests/engines/training/mesh_oracle.py`` that have a dimension which the
defect concerns, until one differs from what one rank does with the true source, or ends with an error; at most
``--most`` of them. Every configuration passes without a defect first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "engines" / "training"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from mesh_oracle import Case, Oracle  # noqa: E402
from mutants import Mutant, Planted  # noqa: E402

GOAL = 30

RANKS, PARALLEL, MODEL = (f"engines/training/{name}.py" for name in ("rank_group", "parallel", "model"))
SCORES, LOADING, CHECKPOINT = (f"engines/training/{name}.py" for name in ("log_probs", "loading", "checkpoint"))
OPTIMIZER, PARTITION, PASSES = (f"engines/training/{name}.py" for name in ("optimizer", "partition", "passes"))
PIPELINE, SHARDED, PACKING = (f"engines/training/{name}.py" for name in ("pipeline", "sharded_engine", "packing"))
ATTENTION, ENGINE, SHAPE = "engines/training/packed_attention.py", "engines/training/fsdp_engine.py", "asyncrl/mesh.py"


@dataclass(frozen=True)
class Defect:
    what: str
    on: str  # the dimensions that a configuration must have, one of them if there are several (a+b: both); empty: any
    file: str
    old: str
    new: str
    having: tuple[tuple[str, object], ...] = ()  # what a configuration must have beside that

    @property
    def mutant(self) -> Mutant:
        source = (ROOT / self.file).read_text()
        if source.count(self.old) != 1:
            raise SystemExit(f"{self.file} has {source.count(self.old)} times, not once: {self.old!r} ({self.what})")
        line = source[: source.index(self.old)].count("\n") + 1
        return Mutant(self.file, line, self.old, self.new, source.replace(self.old, self.new))


DEFECTS = (
    # dispatch and groups
    Defect("data ranks are counted by tp alone", "dp_shard+cp dp_replicate+cp", SHAPE, "self.cp * self.tp", "self.tp"),
    Defect(
        "data ranks are those of the innermost dimension",
        "cp tp",
        SHAPE,
        "rank // self.copies",
        "rank % self.data_size",
    ),
    Defect(
        "sums of losses count every copy", "cp tp", RANKS, "self._data = group_over(1, 2)", "self._data = self._group"
    ),
    Defect(
        "sums of losses leave replicas out",
        "dp_replicate",
        RANKS,
        "self._data = group_over(1, 2)",
        "self._data = group_over(2)",
    ),
    Defect(
        "weights are sharded over shards without pieces",
        "cp",
        RANKS,
        "group_over(2, 3), group_over(4)",
        "group_over(2), group_over(4)",
    ),
    Defect(
        "the replicas' gradients are not summed",
        "dp_replicate",
        RANKS,
        "(replicas, shards) if shape.dp_replicate > 1 else (shards,)",
        "(shards,)",
    ),
    Defect(
        "the gradient is the mean over ranks",
        "",
        MODEL,
        "sharded.set_gradient_divide_factor(1.0)",
        "sharded.set_gradient_divide_factor(mesh.size())",
    ),
    Defect(
        "the gradient is the mean over the ranks of a replica",
        "dp_replicate",
        MODEL,
        "sharded.set_gradient_divide_factor(1.0)",
        "sharded.set_gradient_divide_factor(mesh.shape[-1])",
    ),
    Defect(
        "the gradient is scaled by parts",
        "tp",
        PASSES,
        "            return weighted\n",
        "            return weighted * self._ranks.shape.tp\n",
    ),
    # norm of gradients
    Defect(
        "copies of a shard are all counted in the norm",
        "dp_replicate tp",
        OPTIMIZER,
        ".square() / self._copies[name]",
        ".square()",
    ),
    Defect(
        "replicated weights are counted as sharded in the norm",
        "tp dp_replicate",
        OPTIMIZER,
        "if not placement.is_replicate())",
        "if True)",
    ),
    Defect(
        "the norm is that of data ranks",
        "tp cp",
        PASSES,
        "self._ranks.sum_over_all([squared_norm()])",
        "self._ranks.sum([squared_norm()])",
    ),
    Defect(
        "the norm is that of each rank", "", PASSES, "self._ranks.sum_over_all([squared_norm()])", "[squared_norm()]"
    ),
    # exchange of rows
    Defect(
        "rows are sent by rank, not by data rank",
        "cp tp",
        PARTITION,
        "if rank == ranks.data_rank]",
        "if rank == ranks.rank]",
    ),
    Defect(
        "a rank's rows begin where another's do",
        "",
        PARTITION,
        "first = sum(held[: ranks.data_rank])",
        "first = sum(held[: ranks.data_rank + 1]) - held[ranks.data_rank] + (ranks.data_rank > 0)",
    ),
    Defect(
        "results go back in the order they came in",
        "",
        PARTITION,
        "restored[self._order] = found[:, 0]",
        "restored[:] = found[:, 0]",
    ),
    Defect(
        "rows are not in the order of their senders",
        "",
        PARTITION,
        "rows.input_ids.int(), rows.mask.int()",
        "rows.input_ids.int().flip(0), rows.mask.int()",
    ),
    # products
    Defect(
        "tied weights are untied by the division",
        "tp",
        PARALLEL,
        "        head.weight = embeddings.weight\n",
        "        pass\n",
    ),
    Defect(
        "gradients of hidden states miss other parts of the vocabulary",
        "tp",
        SCORES,
        "            options.reduce(hidden_gradient)\n",
        "            pass\n",
    ),
    Defect(
        "norms of single heads are taken over those of all ranks",
        "tp",
        PARALLEL,
        "sequence_dim=2",
        "sequence_dim=3",
        (("family", "qwen3"),),
    ),
    Defect(
        "the vocabulary's parts begin one id late",
        "tp",
        SCORES,
        "head.group.rank() * vocabulary",
        "head.group.rank() * (vocabulary + 1)",
    ),
    Defect(
        "every rank has the first part of the vocabulary",
        "tp",
        SCORES,
        "head.group.rank() * vocabulary",
        "0 * vocabulary",
    ),
    Defect(
        "the largest logit is each part's own",
        "tp",
        SCORES,
        "options.reduce(top.clone(), dist.ReduceOp.MAX)",
        "top.clone()",
    ),
    Defect(
        "sums over the vocabulary are not shared",
        "tp",
        SCORES,
        "        sums = options.reduce(\n            torch.stack(",
        "        sums = torch.clone(\n            torch.stack(",
    ),
    Defect("sums of parts are not brought to one maximum", "tp", SCORES, "total * share,", "total,"),
    Defect(
        "a target outside the part is counted there",
        "tp",
        SCORES,
        "torch.where(here, chosen + apart, 0.0)",
        "chosen + apart",
    ),
    Defect(
        "the entropy of a part is relative to its own maximum",
        "tp",
        SCORES,
        "(weighted + total * apart) * share",
        "weighted * share",
    ),
    Defect(
        "the most likely token is that of any part",
        "tp",
        SCORES,
        "torch.where(apart == 0, largest + options.first, unset)",
        "largest + options.first",
        (("task", "supervised"),),
    ),
    Defect(
        "the gradient of a target is given in every part",
        "tp",
        SCORES,
        "torch.where(here, by_log_prob, 0.0)[:, None]",
        "by_log_prob[:, None]",
    ),
    Defect(
        "the last id of a part is outside",
        "tp",
        SCORES,
        "(places >= 0) & (places < size)",
        "(places >= 0) & (places < size - 1)",
    ),
    # streams
    Defect("pieces begin one cell late", "cp", MODEL, "(predictors >= first)", "(predictors > first)"),
    Defect(
        "the last cell of a piece scores nothing",
        "cp",
        MODEL,
        "(predictors < first + len(states))",
        "(predictors < first + len(states) - 1)",
    ),
    Defect(
        "a piece takes a neighbour's cell",
        "cp",
        MODEL,
        "predictors[mine] - first)",
        "(predictors[mine] - first - 1).clamp(min=0))",
    ),
    Defect(
        "positions begin again in each piece",
        "cp",
        MODEL,
        "input_ids, positions = (nn.functional.pad(each, (0, padding))[piece] for each in (input_ids, positions))",
        "input_ids, positions = nn.functional.pad(input_ids, (0, padding))[piece], torch.arange(size)",
    ),
    Defect(
        "padding is put before the stream",
        "cp",
        MODEL,
        "nn.functional.pad(each, (0, padding))",
        "nn.functional.pad(each, (padding, 0))",
    ),
    Defect(
        "scores of other pieces are left out", "cp", MODEL, "sum_of_ranks(found, self.cp).unbind()", "found.unbind()"
    ),
    Defect(
        "gradients of scores are summed over pieces",
        "cp",
        PARALLEL,
        "        return gradients[0], None\n",
        "        return gradients[0] * 2, None\n",
    ),
    Defect(
        "values are those of other heads",
        "cp",
        ATTENTION,
        "for each in (query, key, value))\n    return piece",
        "for each in (query, key, value.flip(1)))\n    return piece",
    ),
    Defect(
        "heads of keys are repeated as a whole",
        "cp",
        PARALLEL,
        "tensor.repeat_interleave(repeats + 1, dim=1)",
        "tensor.repeat(1, repeats + 1, 1, 1)",
        (("mesh", {"cp": 4}), ("kv_heads", 2)),
    ),
    Defect(
        "the exchange's gradient is not exchanged back",
        "cp",
        PARALLEL,
        "_exchanged(gradients[0], ctx.joined, ctx.cut, ctx.group)",
        "_exchanged(gradients[0].flip(ctx.joined), ctx.joined, ctx.cut, ctx.group)",
    ),
    Defect(
        "pieces are joined in the wrong order",
        "cp",
        PARALLEL,
        "torch.cat(received.unbind(0), dim=joined)",
        "torch.cat(received.flip(0).unbind(0), dim=joined)",
    ),
    # stages
    Defect("a stage has a layer less", "pp", PIPELINE, "first <= place < stop else", "first <= place < stop - 1 else"),
    Defect("every stage has the norm", "pp", PIPELINE, "if stop < len(whole.layers):", "if False:"),
    Defect(
        "a stage computes the batch before",
        "pp",
        PIPELINE,
        "self.batches[number]",
        "self.batches[number - 1]",
    ),
    Defect(
        "the loss is that of another batch", "pp", PIPELINE, "return then(int(number),", "return then(int(number) - 1,"
    ),
    Defect("gradients are averaged over micro-batches", "pp", PIPELINE, "scale_grads=False", "scale_grads=True"),
    Defect("entropy is taken for log-probs", "pp", PIPELINE, "log_probs, extra = found", "extra, log_probs = found"),
    Defect(
        "scores are padded in front",
        "pp",
        PIPELINE,
        "(0, self.scored - both.shape[1])",
        "(self.scored - both.shape[1], 0)",
    ),
    Defect(
        "rows of padding are taken for the first ones",
        "pp",
        PACKING,
        "(*self.rectangles, *rectangles)",
        "(*rectangles, *self.rectangles)",
    ),
    Defect("metrics are those of the first stage", "pp", RANKS, "self.shape.pp - 1)", "0)"),
    Defect(
        "stages are counted as copies in the norm",
        "pp",
        SHARDED,
        "world_size=self._ranks.stage_size",
        "world_size=self.world_size",
    ),
    Defect(
        "a tensor is sent by another stage",
        "pp",
        PIPELINE,
        "places[name] = number % group.size()",
        "places[name] = (number + 1) % group.size()",
    ),
    Defect("data ranks count stages", "pp", SHAPE, "// self.copies % self.data_size", "// self.copies // self.pp"),
    Defect(
        "the steps of other stages are not saved",
        "pp",
        CHECKPOINT,
        "    if model.pipeline is None:\n        return steps",
        "    if True:\n        return steps",
    ),
    # experts
    Defect(
        "a rank has its experts in the opposite order",
        "ep",
        PARALLEL,
        "torch.arange(received.shape[1], device=slots.device)",
        "torch.arange(received.shape[1], device=slots.device).flip(0)",
    ),
    Defect(
        "tokens are sent to one rank as often as to all",
        "ep",
        PARALLEL,
        "sent.sum(1).tolist(), received.sum(1).tolist()",
        "[len(slots) // ranks] * ranks, [len(slots) // ranks] * ranks",
    ),
    Defect(
        "the counts of tokens are those of experts alike, not of ranks",
        "ep",
        PARALLEL,
        ".view(ranks, -1)\n    received",
        ".view(-1, ranks).T.contiguous()\n    received",
    ),
    Defect(
        "slots are taken for tokens",
        "ep",
        PARALLEL,
        "order // chosen.shape[1]",
        "order % len(states)",
    ),
    Defect("results stay in the order of experts", "ep", PARALLEL, "(back[place].view(", "(back.view("),
    Defect("results are taken where they were sent from", "ep", PARALLEL, "(back[place].view(", "(back[order].view("),
    Defect(
        "the router's weights are dropped",
        "ep",
        PARALLEL,
        ".view(*chosen.shape, states.shape[-1]) * weights[..., None])",
        ".view(*chosen.shape, states.shape[-1]))",
    ),
    Defect("the router gets no gradient", "ep", PARALLEL, "* weights[..., None])", "* weights[..., None].detach())"),
    Defect(
        "gradients of tokens return to another token",
        "ep",
        PARALLEL,
        "_sent(gradients[0], ctx.receives",
        "_sent(gradients[0].roll(1, 0), ctx.receives",
    ),
    Defect(
        "gradients of tokens are averaged over ranks",
        "ep",
        PARALLEL,
        "_sent(gradients[0], ctx.receives",
        "_sent(gradients[0] / ctx.group.size(), ctx.receives",
    ),
    Defect(
        "experts get the gradients of one replica",
        "dp_replicate+ep",
        RANKS,
        "self.expert_mesh, self.ep = whole[sharded], whole[owners]",
        "self.expert_mesh, self.ep = whole[(shards,)], whole[owners]",
    ),
    Defect(
        "the gradients of experts are scaled",
        "ep",
        MODEL,
        "sharded.set_gradient_divide_factor(1.0)",
        "sharded.set_gradient_divide_factor(2.0 if type(module).__name__.endswith('Experts') else 1.0)",
    ),
    Defect(
        "ranks with other experts are counted as copies in the norm",
        "ep",
        OPTIMIZER,
        "sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)",
        "sizes = zip(parameter.device_mesh.shape[: 1 if parameter.ndim == 3 else None], parameter.placements)",
    ),
    Defect("an expert is read where another lies", "ep", LOADING, "start=(row, column", "start=(row ^ 1, column"),
    Defect("gates are read for what they open", "ep", LOADING, "else order.index(each))", "else -order.index(each))"),
    # shards of files
    Defect(
        "the first rows are read by every rank",
        "",
        LOADING,
        "slice(first, first + size) for first, size in zip(firsts",
        "slice(0, size) for first, size in zip(firsts",
    ),
    Defect(
        "columns of a divided product are those of the first part",
        "tp",
        LOADING,
        "(slice(first, first + len(part)), *place[1:])",
        "(slice(first, first + len(part)), *(slice(0, each.stop - each.start) for each in place[1:]))",
    ),
    Defect(
        "moments are those of the first shard",
        "",
        CHECKPOINT,
        "part, place_of_shard(parameters[name] if alike else part)",
        "part, tuple(slice(0, size) for size in part.shape)",
    ),
    Defect(
        "moments are saved as other shards",
        "",
        CHECKPOINT,
        "weights[name] if alike else part, part\n",
        "weights[name] if alike else part, part.flip(0)\n",
    ),
    Defect(
        "a loaded checkpoint leaves weights as they were",
        "",
        CHECKPOINT,
        "targets = {name: (local_shard(tensor), place_of_shard(tensor))",
        "targets = {name: (local_shard(tensor).clone(), place_of_shard(tensor))",
    ),
    Defect(
        "a part of a saved piece is read from its beginning",
        "",
        LOADING,
        "slice(low - start, high - start)",
        "slice(0, high - low)",
    ),
    Defect(
        "parts of a product that begin with the same row are saved once",
        "tp",
        CHECKPOINT,
        "if theirs[begin : begin + len(place)] == place]",
        "if theirs[begin : begin + 2] == place[:2]]",
    ),
    Defect(
        "a snapshot changes with the weights",
        "",
        CHECKPOINT,
        "return {name: self.tensors[name] for name in shards}",
        "return dict(shards)",
    ),
    Defect(
        "a gathered tensor begins with its last row",
        "",
        CHECKPOINT,
        "else tensor.full_tensor()\n",
        "else tensor.full_tensor().roll(1, 0)\n",
    ),
)


def plant(number: int) -> None:
    sys.meta_path.insert(0, Planted(DEFECTS[number].mutant))


def cases(defect: Defect, most: int) -> Iterator[Case]:
    """Configurations with more than one size in a dimension that the defect concerns."""
    wanted = [set(each.split("+")) for each in defect.on.split()]
    drawn = (
        case
        for case in map(Case.draw, count(5000))
        if all(getattr(case, name) == value for name, value in defect.having)
    )
    return islice((case for case in drawn if not wanted or any(each <= case.mesh.keys() for each in wanted)), most)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="defects whose description has this text")
    parser.add_argument("--most", type=int, default=8, help="configurations that may miss a defect")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [number for number, defect in enumerate(DEFECTS) if arguments.only in defect.what]
    for number in chosen:
        DEFECTS[number].mutant  # noqa: B018  each has its place
    found: list[dict[str, object]] = []
    sound: dict[int, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, Oracle(Path(folder)) as truth:
        for number in chosen:
            defect, by = DEFECTS[number], ""
            played = 0
            with Oracle(Path(folder), prepare=partial(plant, number)) as oracle:
                for case in cases(defect, arguments.most):
                    if case.seed not in sound:
                        sound[case.seed] = truth.judge(case)
                    if sound[case.seed]:
                        raise SystemExit(f"configuration {case.seed} fails without a defect: {sound[case.seed]}")
                    played += 1
                    if differences := oracle.judge(case):
                        by = f"seed {case.seed}: {differences[0]:.100}"
                        break
            found.append({"what": defect.what, "found": bool(by), "configurations": played, "by": by})
            if not arguments.json:
                print(f"{'found' if by else 'MISSED':7s}{played:3d}  {defect.what:60s} {by}", flush=True)
    number = sum(bool(each["found"]) for each in found)
    figures = {"defects": len(found), "found": number, "goal": GOAL, "holds": number == len(found) >= GOAL}
    print(json.dumps({"figures": figures, "defects": found}) if arguments.json else figures)
    return 0 if number == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
