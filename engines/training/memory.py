"""What an update needs of memory on each rank: its own code runs once on tensors without memory, which are counted.

The model is made from its configuration alone, with three and with four of its layers, sharded over as many ranks as
there are to be (torch's process group without a network), and two micro-batches go forward and backward under torch's
``FakeTensorMode``, whose tensors have sizes and no contents. Each of its other layers needs what the fourth one added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.errors import ConfigError
from asyncrl.mesh import MemoryPlan, MeshShape
from engines.training.loading import WeightFiles, give_memory
from engines.training.log_probs import Extras, TokenScores
from engines.training.lora import LoRA
from engines.training.model import ComputeDtype, PolicyModel, check_mesh, load_policy_model, local_shard, shard
from engines.training.optimizer import OptimizerName, ShardedOptimizer, make_tables
from engines.training.packed_attention import forget_masks
from engines.training.packing import Layout
from engines.training.rank_group import RankGroup

KINDS = ("weights", "gradients", "moments", "gathered", "activations", "head")
"""What memory is held for: the fields of :class:`~asyncrl.mesh.MemoryPlan`."""

_LAYERS = 3
"""The layers of the smaller model: a first one, a last one, and one between them, as all others are."""


def plan_memory(
    path: str,
    *,
    shape: MeshShape,
    device_type: str = "cpu",
    dtype: ComputeDtype = "float32",
    lora: LoRA | None = None,
    gradient_checkpointing: bool = False,
    max_tokens: int,
    row_tokens: int,
    scored: float = 1.0,
    extras: Extras = "entropy",
    optimizer: OptimizerName = "adamw",
    optimizer_options: Mapping[str, Any] | None = None,
) -> MemoryPlan:
    """Return what each rank of a trainer needs at most in an update; nothing but the configuration of ``path`` is read.

    Micro-batches have ``max_tokens`` cells, or one row where that is longer, in rows of ``row_tokens``, of which the
    share ``scored`` is trained on. Not counted: what a library has beside tensors (its code, a CUDA context, workspaces
    of matrix products), and what an allocator holds beyond them.

    Raises:
        ConfigError: the model cannot be divided over the mesh, has to be read as a whole before that is known, or has
            stages; or this process belongs to a torch process group already.
        OSError: there is no such model.
    """
    from transformers import AutoConfig

    if shape.pp > 1:
        raise ConfigError("the memory of stages is not planned", path="mesh.pp", remedy="plan a mesh without pp")
    if dist.is_initialized():
        raise ConfigError("memory is planned in a process without a torch process group", remedy="use another process")
    text: Any = AutoConfig.from_pretrained(path).get_text_config()
    layers = int(text.num_hidden_layers)
    cells = max(max_tokens, row_tokens)
    dist.init_process_group("fake", rank=0, world_size=shape.ranks)
    try:
        traces = [
            _traced(
                load_policy_model(
                    path,
                    gradient_checkpointing=gradient_checkpointing,
                    lora=lora,
                    sharded=True,
                    dtype=dtype,
                    files=_NoFiles({}),
                    layers=depth,
                ),
                shape,
                device_type=device_type,
                dtype=dtype,
                cells=cells,
                row_tokens=row_tokens,
                scored=max(1, int(cells * scored)),
                extras=extras,
                optimizer=optimizer,
                optimizer_options=optimizer_options,
            )
            for depth in ((_LAYERS, _LAYERS + 1) if layers > _LAYERS + 1 else (layers,))
        ]
    finally:
        dist.destroy_process_group()
    first, *deeper = traces
    peaks = [
        {kind: size + (layers - _LAYERS) * (more[kind] - size) for kind, size in phase.items()}
        for deep in deeper
        for phase, more in zip(first, deep, strict=True)
    ] or first
    return MemoryPlan(shape=shape, **max(peaks, key=lambda held: sum(held.values())))


class _NoFiles(WeightFiles):
    """Stands for weights that are not there: nothing is compared with them or read."""

    def fuse(self, causal_lm: Any) -> bool:
        """Return False for mixtures: which tokens an expert gets, and so the sizes, is known by their values alone."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        return not get_model_conversion_mapping(causal_lm, add_legacy=False)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None: ...

    def read(self, targets: Mapping[str, tuple[Tensor, tuple[slice, ...]]]) -> None: ...


def _rectangles(cells: int, length: int, layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return rows of ``length`` in ``cells``; packed ones are of two lengths, which are attended to one by one."""
    if layout == "padded":
        return ((cells // length, length),)
    if length == cells:
        return ((1, cells),)
    rows = max(1, cells // length - (cells % length == 0))
    return ((rows, length), (1, cells - rows * length))


def _traced(
    model: PolicyModel,
    shape: MeshShape,
    *,
    device_type: str,
    dtype: ComputeDtype,
    cells: int,
    row_tokens: int,
    scored: int,
    extras: Extras,
    optimizer: OptimizerName,
    optimizer_options: Mapping[str, Any] | None,
) -> list[dict[str, int]]:
    """Return bytes of each kind when most are held, for each phase of a micro-batch behind the first."""
    ranks = RankGroup(rank=0, world_size=shape.ranks, device="cpu", shape=shape)
    check_mesh(model, ranks.shape)
    model.planned_for = device_type
    model.to("meta")  # adapters have been drawn
    shard(model, ranks, dtype=dtype)
    rectangles = _rectangles(cells, row_tokens, model.layout)
    make_tables(optimizer)
    with _own_masks(), FakeTensorMode(allow_non_fake_inputs=True):
        give_memory(model, model.causal_lm, device=ranks.device)
        model.free_gathered()
        trace = _Trace(model)
        _replace_forward(model, trace, shape.cp, scored=scored, extras=extras)
        ids = torch.zeros(sum(rows * length for rows, length in rectangles), dtype=torch.int64)
        with trace:
            for _ in range(2):
                trace.begin()
                scores: TokenScores = model(ids, ids, ids, ids, rectangles=rectangles)
                (scores.log_probs.sum() + scores.entropy.sum()).backward()
            trace.enter("moments")
            made = ShardedOptimizer(
                model.parameters_by_name(),
                world_size=shape.ranks,
                name=optimizer,
                options=optimizer_options,
                apart=model.vocabulary_weights(),
            )
            made.step(lr=0.0)
            state = trace.held()["moments"]  # it was there before
    ranks.close()
    return [phase | {"moments": max(phase["moments"], state)} for phase in trace.phases]


@contextmanager
def _own_masks() -> Iterator[None]:
    """Let attention make the masks that it keeps: a trace counts them, and they have no contents for others."""
    forget_masks()
    try:
        yield
    finally:
        forget_masks()


def _replace_forward(model: PolicyModel, trace: _Trace, cp: int, *, scored: int, extras: Extras) -> None:
    """Let the model score ``scored`` tokens, with its share of the cells: which they are is no matter of sizes."""

    def forward(ids: Tensor, positions: Tensor, *_: Tensor, rectangles: tuple[tuple[int, int], ...]) -> TokenScores:
        states = model.hidden_states(ids, positions, rectangles=rectangles)
        trace.enter("head")
        wanted = ids[: -(-scored // cp)]
        return model.scores(states.index_select(0, wanted), wanted, extras=extras, temperature=1.0)

    model.forward = forward  # type: ignore[method-assign, assignment]  # the hooks of FSDP lie around it


class _Trace(TorchDispatchMode):
    """Counts the bytes of all tensors after every operation, by kind; those of a kernel's own use do not show.

    Phases are those in which most may be held, whichever it is: up to the gradient of the last layer's output, in the
    layers, behind the gradient of the first one's output, and the optimizer's step.
    """

    def __init__(self, model: PolicyModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.phases: list[dict[str, int]] = []
        self._model = model
        self._kind = "activations"
        self._sizes: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._held: dict[int, tuple[str, int, ReferenceType[UntypedStorage]]] = {}  # kind and bytes, by address
        self._resized: list[ReferenceType[UntypedStorage]] = []  # what FSDP gathers into: no operation changes its size
        for tensor in (*model.parameters(), *model.buffers()):
            self._see(tensor, "weights")
        names = set(model.causal_lm._no_split_modules or ())  # noqa: SLF001  # as shard() does
        layers = [module for module in model.causal_lm.modules() if type(module).__name__.removeprefix("FSDP") in names]
        for layer in (layers[0], layers[-1]):
            layer.register_forward_hook(self._behind)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: torch's
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its parts come next
        found = func(*args, **kwargs or {})
        kind = "gathered" if func.namespace in ("fsdp", "c10d") else self._kind
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and not hasattr(each, "__tensor_flatten__"):  # the parts of such a one are seen
                self._see(each, kind)
        self._count(_copied_by_gloo(func, args) if self._model.planned_for == "cpu" else 0)
        return found

    def begin(self) -> None:
        """Begin a micro-batch. The one before has left gradients, and empty memory that is gathered into."""
        self.phases.clear()
        gradients = {_address(each.grad) for each in self._model.parameters() if each.grad is not None}
        for key, (kind, size, reference) in list(self._held.items()):
            storage = reference()
            if key in gradients or (storage is not None and not storage.nbytes()):
                self._sizes[kind] -= size
                kind, size = ("gradients", size) if key in gradients else ("gathered", 0)  # noqa: PLW2901
                self._sizes[kind] += size
                self._held[key] = kind, size, reference
                self._resized += [reference] if kind == "gathered" else []
        self.enter("activations")

    def enter(self, kind: str) -> None:
        self._kind = kind
        if kind != "head":
            self.phases.append({})
            self._count()

    def held(self) -> dict[str, int]:
        """Return the bytes of each kind that are held."""
        gathered = sum(storage.nbytes() for each in self._resized if (storage := each()) is not None)
        return self._sizes | {"gathered": self._sizes["gathered"] + gathered}

    def _count(self, copied: int = 0) -> None:
        held = self.held()
        held["gathered"] += copied
        if sum(held.values()) > sum(self.phases[-1].values()):
            self.phases[-1] = held

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = local_shard(tensor).untyped_storage()
        if (key := storage._cdata) not in self._held:  # noqa: SLF001  # its address, which is another's later
            self._held[key] = kind, storage.nbytes(), ref(storage)
            self._sizes[kind] += storage.nbytes()
            finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        kind, size, _ = self._held.pop(key)
        self._sizes[kind] -= size

    def _behind(self, _module: nn.Module, _args: object, output: Any) -> None:
        (output if isinstance(output, Tensor) else output[0]).register_hook(lambda _: self.enter("activations"))


def _copied_by_gloo(func: Any, args: tuple[Any, ...]) -> int:  # Any: torch's
    """Return the bytes that the backend of CPUs has for itself: a copy of what is gathered, or is to be reduced."""
    if func.namespace != "c10d" or "_base_" not in func.__name__:
        return 0
    output, given = args[:2]
    return max(int(each.nbytes) for each in (output, given))


def _address(tensor: Tensor) -> int:
    return int(local_shard(tensor).untyped_storage()._cdata)  # noqa: SLF001
