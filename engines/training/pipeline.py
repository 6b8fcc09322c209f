"""The layers of a model on several ranks, which hand micro-batches on: pipeline parallelism.

Each rank holds some layers, the first stage the embeddings, too, and the last one norm and head. A stage runs the code
of the whole model without the layers that it does not have, so that families need no code of their own. The schedule is
torch's (``torch.distributed.pipelining``): one forward and one backward pass in turns (1F1B), interleaved where a rank
has several stages. What travels is the hidden states of a micro-batch and their gradient; its rows are the same on all
ranks of a pipeline.

torch makes memory for what every micro-batch of a schedule receives before the first one, so a schedule has at most
:data:`WINDOW` of them for each rank, and is run several times. Its module takes half a second to import, so only what
has stages does.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from asyncrl.errors import ConfigError
from engines.training.loading import small_causal_lm
from engines.training.log_probs import Extras, TokenScores
from engines.training.packing import PackedMicroBatch

if TYPE_CHECKING:
    from engines.training.model import PolicyModel


WINDOW = 8
"""Micro-batches of a schedule for each rank, at most: ranks are idle for less than a ninth of the time."""


class _Absent(nn.Module):
    """What is on another rank."""

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states


def _body(whole: Any, first: int, stop: int) -> Any:
    """Return the body of a model with some of its layers: a copy that has its modules, but those of other stages."""
    body: Any = copy.copy(whole)
    body._modules = dict(whole._modules)  # noqa: SLF001  # the copy's own
    body.layers = nn.ModuleList(
        layer if first <= place < stop else _Absent() for place, layer in enumerate(whole.layers)
    )
    if stop < len(whole.layers):
        body.norm = _Absent()
    return body


class Stage(nn.Module):
    """Layers ``first`` to ``stop`` of a model, under the code of the whole. What they do not pass on is set before."""

    def __init__(self, model: PolicyModel, first: int, stop: int) -> None:
        super().__init__()
        whole: Any = model.causal_lm.base_model
        self.is_first, self.is_last = first == 0, stop == len(whole.layers)
        self.body = _body(whole, first, stop)
        if not self.is_first:
            self.body.embed_tokens = None
        self.head = model.causal_lm.get_output_embeddings() if self.is_last else None
        self._hidden_states, self._scores_in = model.hidden_states, model.scores_in
        self.batches: Sequence[PackedMicroBatch] = ()  # of a pass
        self.scored = 0  # the most tokens that are scored in one of them
        self.extras: Extras = "none"
        self.temperature = 1.0

    def forward(self, states: Tensor, number: int) -> Tensor:
        """Return the hidden states [1, T, H] behind these layers; of the last ones, log-probs and extras [2, scored].

        ``number`` is that of the micro-batch; T is that of a context-parallel rank's piece.
        """
        batch = self.batches[number]
        found = self._hidden_states(
            batch.input_ids,
            batch.positions,
            rectangles=batch.rectangles,
            prefixes=batch.prefixes,
            body=self.body,
            states=None if self.is_first else states,
        )
        if not self.is_last:
            return found
        scores = self._scores_in(
            found[0], batch.predictors, batch.targets, extras=self.extras, temperature=self.temperature
        )
        extra = scores.correct if self.extras == "correct" else scores.entropy
        both = torch.stack([scores.log_probs, extra if len(extra) else torch.zeros_like(scores.log_probs)])
        return nn.functional.pad(both, (0, self.scored - both.shape[1]))


class _Numbered(nn.Module):
    """Hands a stage the number of a micro-batch as an integer, which FSDP does not send to the device.

    It also hides from the schedule that the stage is sharded: FSDP would keep whole gradients until the last one.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, states: Tensor, number: Tensor) -> Tensor:
        found: Tensor = self.stage(states, int(number))
        return found


class Pipeline:
    """The stages of this rank, and where all tensors of the model are. Made by :func:`divide_layers`.

    Attributes:
        places: by name, in the model's order, the rank of ``group`` that has a tensor, and the tensor without memory.
    """

    def __init__(
        self,
        group: ProcessGroup,
        stages: Mapping[int, Stage],
        places: Mapping[str, tuple[int, Tensor]],
        *,
        states: Tensor,
        pieces: int,
    ) -> None:
        self.group = group
        self.stages = dict(stages)
        self.places = dict(places)
        self._states = states  # [1, 1, H], for shape, dtype and device of what travels
        self._pieces = pieces
        self._count = group.size() * len(stages)

    @property
    def least(self) -> int:
        """The fewest micro-batches of a pass."""
        return self.group.size()

    def microbatches(self, needed: int) -> int:
        """Return how many micro-batches a pass has that needs so many; the others are dummies."""
        ranks, windows = self.group.size(), self._windows(needed)
        size = max(-(-needed // windows), ranks)
        while len(self.stages) > 1 and size % (size // ranks):  # what the interleaved schedule takes
            size += 1
        return windows * size

    def _windows(self, microbatches: int) -> int:
        return max(1, -(-microbatches // (WINDOW * self.group.size())))

    def run(
        self,
        batches: Sequence[PackedMicroBatch],
        then: Callable[[int, TokenScores], Tensor],
        *,
        extras: Extras,
        temperature: float,
    ) -> None:
        """Compute :meth:`microbatches`, with gradients if they are enabled; those of before are discarded.

        Collective among the ranks of the rows. ``then``, on the ranks that have the last stage, maps a micro-batch's
        number and scores to what is minimised.
        """
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        device, scored = self._states.device, max(len(batch.predictors) for batch in batches)
        cells = -(-max(len(batch.input_ids) for batch in batches) // self._pieces)
        padded = [batch.padded(cells * self._pieces) for batch in batches]
        size = len(batches) // self._windows(len(batches))
        staged: list[Any] = []
        for place, stage in self.stages.items():
            stage.batches, stage.scored, stage.extras, stage.temperature = padded, scored, extras, temperature
            states = self._states.expand(1, cells, -1).clone()
            given = states.requires_grad_() if place else torch.zeros(1, device=device)
            found = torch.zeros(2, scored, device=device) if stage.is_last else states.clone()
            found.requires_grad_()
            like: Any = {"input_args": given, "output_args": found}
            staged.append(PipelineStage(_Numbered(stage), place, self._count, device, **like, group=self.group))

        def loss(found: Tensor, number: Tensor) -> Tensor:
            log_probs, extra = found[:, : len(batches[int(number)].predictors)].unbind()
            extra = extra if extras == "entropy_gradient" else extra.detach()
            nothing = log_probs.new_zeros(0)
            both = {"none": (nothing, nothing), "correct": (nothing, extra)}.get(extras, (extra, nothing))
            return then(int(number), TokenScores(log_probs, *both))

        kind: Any = Schedule1F1B if len(staged) == 1 else ScheduleInterleaved1F1B
        schedule = kind(staged[0] if len(staged) == 1 else staged, size, loss_fn=loss, scale_grads=False)
        step = schedule.step if torch.is_grad_enabled() else schedule.eval
        inputs = (torch.zeros(size, device=device),) if 0 in self.stages else ()
        try:
            for numbers in torch.arange(len(batches)).split(size):
                last = {"target": numbers, "losses": []} if self._count - 1 in self.stages else {}
                step(*inputs, number=numbers, return_outputs=False, **last)
        finally:
            for stage in self.stages.values():
                stage.batches = ()


def divide_layers(
    model: PolicyModel, group: ProcessGroup, *, stages_per_rank: int, dtype: torch.dtype, device: torch.device
) -> Pipeline:
    """Leave out of a model, with memory or without, what is on other ranks; :func:`check_layers` has accepted it.

    Rank r has the stages r, r + ranks, ... of equal numbers of layers.
    """
    causal_lm: Any = model.causal_lm
    base, count = causal_lm.base_model, group.size() * stages_per_rank
    each = len(base.layers) // count
    stages = {
        number: Stage(model, number * each, (number + 1) * each) for number in range(group.rank(), count, group.size())
    }
    places: dict[str, tuple[int, Tensor]] = {}
    for name, tensor in model.tensors_by_name():
        layer = re.match(rf"{causal_lm.base_model_prefix}\.layers\.(\d+)\.", name)
        first = name.startswith(f"{causal_lm.base_model_prefix}.embed_tokens.")
        number = int(layer[1]) // each if layer else 0 if first else count - 1
        places[name] = number % group.size(), torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    for place in range(len(base.layers)):
        if place // each not in stages:
            base.layers[place] = _Absent()
    if 0 not in stages:
        base.embed_tokens = _Absent()
    if count - 1 not in stages:
        base.norm = _Absent()
        causal_lm.set_output_embeddings(_Absent())
    states = torch.zeros(1, 1, int(causal_lm.config.get_text_config().hidden_size), dtype=dtype, device=device)
    return Pipeline(group, stages, places, states=states, pieces=model.cp.size() if model.cp is not None else 1)


def check_layers(model: PolicyModel, *, ranks: int, stages_per_rank: int) -> None:
    """Raise :class:`ConfigError` unless :func:`divide_layers` can divide the model."""
    from torch.distributed.pipelining import Schedule1F1B

    def refused(rule: str, remedy: str) -> ConfigError:
        return ConfigError(f"mesh.pp = {ranks}: {rule}", path="mesh.pp", remedy=remedy)

    causal_lm: Any = model.causal_lm
    layers, stages = int(causal_lm.config.get_text_config().num_hidden_layers), ranks * stages_per_rank
    if layers % stages:
        rule = f"the {layers} layers of the model are not a multiple of {stages}, pp * stages_per_rank"
        raise refused(rule, f"use a product that divides {layers}")
    if model.layout != "packed":
        raise refused(f"the rows of {model.architecture} are padded", "use pp = 1, or a model whose rows can be packed")
    if "return_outputs" not in inspect.signature(Schedule1F1B.step).parameters:
        raise refused(f"the pipeline schedules of torch {torch.__version__} are too old", "use a newer torch")
    whole = small_causal_lm(causal_lm.config, layers=2).base_model
    known = {"embed_tokens", "layers", "norm", "rotary_emb"}
    if {name.partition(".")[0] for name, _ in whole.named_parameters()} - known or not _divides(whole):
        raise refused(
            f"{model.architecture} does more than layers one after the other",
            "use pp = 1, or a family such as llama, qwen2, qwen3, mistral or gemma2",
        )


def _divides(whole: Any) -> bool:
    """True if the body of a model is the same in two stages, wherever it is divided."""
    ids, layers = torch.arange(4)[None], len(whole.layers)
    with torch.no_grad():
        expected = whole(input_ids=ids, use_cache=False).last_hidden_state
        for place in range(1, layers):
            try:
                states = _body(whole, 0, place)(input_ids=ids, use_cache=False).last_hidden_state
                found = _body(whole, place, layers)(inputs_embeds=states, use_cache=False).last_hidden_state
            except Exception:  # noqa: BLE001  a family's own code; the model is refused by name
                return False
            if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
                return False
    return True
