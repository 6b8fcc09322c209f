"""A transformers causal LM as the trainer needs it: token scores instead of logits, sharded by FSDP2."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.mesh import MeshShape
from asyncrl.model_folder import rotary_change
from engines.training.loading import LoadedModel, WeightFiles, empty_causal_lm, fill, stored_tensors, with_layers
from engines.training.log_probs import Extras, Head, TokenScores, token_log_probs
from engines.training.lora import LoRA, adapter_modules, add_adapters, merged_tensors
from engines.training.packed_attention import (
    PACKED_ATTENTION,
    ROWS,
    RowLayout,
    packed_attention,
    register_packed_attention,
)
from engines.training.packing import Layout
from engines.training.parallel import divide_experts, divide_products, experts_of, sum_of_ranks
from engines.training.partition import RowCost
from engines.training.pipeline import Pipeline, check_layers, divide_layers
from engines.training.quantised import QuantisedLinear, quantise
from engines.training.rank_group import RankGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

model_loading_lock = threading.Lock()
"""Must be held while a transformers model is made.

``from_pretrained`` changes settings of the whole process while it runs (default dtype, device and initialisation
contexts), so a second call in another thread gets wrong weights now and then, silently. A rollout engine and a trainer
that share a process load at the same time.
"""

ComputeDtype = Literal["float32", "bfloat16"]

_log = logging.getLogger(__name__)


class PolicyModel(nn.Module):
    """Scores selected tokens of rows that are packed into one sequence.

    Only the hidden states that predict a selected token reach the output head: for large vocabularies the rest is most
    of the work. Attention is causal and stays within rows (:mod:`engines.training.packed_attention`). A model without
    variable-length attention gets single rectangles instead, padded on the right, where no token attends to padding.
    Neither layout needs an attention mask, so the fastest kernels apply.

    The ranks of a tensor- or context-parallel group call it with the same arguments and get the same scores.
    """

    divides_head: ClassVar[bool] = True
    """Whether tensor-parallel ranks have a part of the output head each."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.layout: Layout = "padded"  # until pack() finds that the model allows the other
        self.lora: LoRA | None = None  # its adapters: only they are trained then
        self.unread: WeightFiles | None = None  # what :func:`shard` fills a model without memory from
        self.tp: ProcessGroup | None = None  # set by :func:`shard`, as the next one
        self.cp: ProcessGroup | None = None
        self.pipeline: Pipeline | None = None
        self.stages = nn.ModuleList()  # of the pipeline
        self.backend: str | None = None  # of torch.compile
        self.planned_for: str | None = None  # type of the device whose memory is planned without it
        self.architecture = type(causal_lm).__name__  # before sharding gives the class another name
        self.kept = _kept_in_float32(causal_lm)
        config: Any = causal_lm.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self._rotary_change = rotary_change(config)
        # Some families change the logits after the head: gemma caps, granite divides, cohere multiplies.
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        predictors: Tensor,
        targets: Tensor,
        *,
        rectangles: tuple[tuple[int, int], ...],
        prefixes: tuple[int | None, ...] = (),
        extras: Extras = "none",
        temperature: float = 1.0,
    ) -> TokenScores:
        """Score N tokens of a micro-batch of T cells.

        Arguments up to ``prefixes`` are fields of :class:`~engines.training.packing.PackedMicroBatch`: one rectangle
        only in the padded layout, and any valid id in cells of padding. ``temperature`` divides the logits.
        """
        states = self.hidden_states(input_ids, positions, rectangles=rectangles, prefixes=prefixes)
        return self.scores_in(states, predictors, targets, extras=extras, temperature=temperature)

    def scores_in(
        self, states: Tensor, predictors: Tensor, targets: Tensor, *, extras: Extras, temperature: float
    ) -> TokenScores:
        """Score N tokens by what :meth:`hidden_states` returned; ``predictors`` are cells of the whole micro-batch."""
        if self.cp is None:
            return self.scores(states.index_select(0, predictors), targets, extras=extras, temperature=temperature)
        # The scores of the tokens that are predicted in this rank's piece.
        first = self.cp.rank() * len(states)
        mine = ((predictors >= first) & (predictors < first + len(states))).nonzero().flatten()
        states = states.index_select(0, predictors[mine] - first)
        scores = self.scores(states, targets[mine], extras=extras, temperature=temperature)
        wanted = [scores.log_probs]
        if extras != "none":
            wanted.append(scores.correct if extras == "correct" else scores.entropy)
        found = torch.stack(wanted).new_zeros(len(wanted), len(predictors)).index_copy(1, mine, torch.stack(wanted))
        # Clones, since FSDP puts its hooks on tensors that are no views.
        log_probs, *more = (each.clone() for each in sum_of_ranks(found, self.cp).unbind())
        nothing = log_probs.new_zeros(0)
        (extra,) = more or (nothing,)
        return TokenScores(log_probs, *((nothing, extra) if extras == "correct" else (extra, nothing)))

    def scores(self, states: Tensor, targets: Tensor, *, extras: Extras, temperature: float) -> TokenScores:
        """Score N tokens by the hidden states [N, H] just before them."""
        return token_log_probs(
            states,
            targets,
            head=self._head() or self.logits_of,
            vocabulary=self.vocabulary,
            extras=extras,
            temperature=temperature,
            backend=self.backend,
            device_type=self.planned_for,
        )

    def hidden_states(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        rectangles: tuple[tuple[int, int], ...],
        prefixes: tuple[int | None, ...] = (),
        body: nn.Module | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states [T, H] of a micro-batch; of a context-parallel model, those of its piece.

        ``body`` are some of the layers, which go on with the ``states`` [1, T, H] of those before them, if there are
        any, and give such states.
        """
        if self.cp is not None:
            ranks = self.cp.size()
            size = -(-len(input_ids) // ranks)
            piece = slice(self.cp.rank() * size, (self.cp.rank() + 1) * size)
            if padding := size * ranks - len(input_ids):
                rectangles, prefixes = (*rectangles, (1, padding)), (*prefixes, None)
            input_ids, positions = (nn.functional.pad(each, (0, padding))[piece] for each in (input_ids, positions))
        if self.layout == "packed":
            rows = RowLayout.of(
                rectangles, device=input_ids.device, prefixes=prefixes, cp=self.cp, device_type=self.planned_for
            )
            keywords: dict[str, Any] = {"position_ids": positions[None], ROWS: rows}
            found = self._decode(input_ids[None], **keywords, body=body, states=states)
        else:
            (shape,) = rectangles
            found = self._decode(input_ids.view(shape))
        return found if body is not None else found.flatten(0, 1)

    def pack(self) -> str:
        """Use the packed layout if its results are those of single rows; return why not, or ``""``.

        Must be called before sharding, on the CPU.
        """
        foreign = _foreign_attention(self.causal_lm.config.get_text_config())
        if foreign:
            return foreign
        lengths = (7, 5, 5, 2)
        draw = torch.Generator().manual_seed(0)
        ids = [torch.randint(0, self.vocabulary, (length,), generator=draw) for length in lengths]
        with torch.no_grad():
            expected = torch.cat([self._decode(row[None])[0] for row in ids])
            config: Any = self.causal_lm.config
            before = config._attn_implementation  # noqa: SLF001  # transformers' own setter has no getter
            rows = RowLayout.of([(1, 7), (2, 5), (1, 2)], device=expected.device)
            register_packed_attention()
            try:
                self.causal_lm.set_attn_implementation(PACKED_ATTENTION)
                positions = torch.cat([torch.arange(length) for length in lengths])
                keywords: dict[str, Any] = {"position_ids": positions[None], ROWS: rows}
                found = self._decode(torch.cat(ids)[None], **keywords)[0]
            except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
                self.causal_lm.set_attn_implementation(before)
                return f"{self.architecture} does not support packed rows: {error}"
        windows = [window for window in rows.windows if window is not None]
        reason = ""
        if not rows.windows or not torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            reason = f"{self.architecture} mixes packed rows: its attention is not the one set in transformers"
        elif windows != _windows(config.get_text_config(), layers=len(rows.windows)):
            reason = f"{self.architecture} does not pass its sliding window to its attention function"
        if reason:
            self.causal_lm.set_attn_implementation(before)
        else:
            self.layout = "packed"
        return reason

    def check_lengths(self, lengths: Iterable[int]) -> None:
        """Raise :class:`InvalidDataError` for a row in which positions would depend on how rows are divided."""
        change, longest = self._rotary_change, max(lengths, default=0)
        if change is not None and longest > change.tokens:
            raise InvalidDataError(
                f"a row has {longest} tokens: rotary positions of {self.architecture} ({change.kind}) are others in "
                f"rows of more than {change.tokens}, and in what is computed with them. Use rows of at most "
                f"{change.tokens} tokens (rollout.max_seq_len), or another model"
            )

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states [N, H]."""
        head: Any = self.causal_lm.get_output_embeddings()
        logits: Tensor = head(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    @cached_property
    def row_cost(self) -> RowCost:
        """The cost of rows, computed from the numbers of weights before the model is divided."""
        config: Any = self.causal_lm.config.get_text_config()
        weights = sum(parameter.numel() for parameter in self.causal_lm.parameters() if parameter.ndim >= 2)
        for module in experts_of(self.causal_lm):  # a token has some of them
            experts = sum(parameter.numel() for parameter in module.parameters())
            used = int(getattr(config, "num_experts_per_tok", None) or module.num_experts)
            weights -= experts - experts * used // int(module.num_experts)
        embeddings = self.vocabulary * int(config.hidden_size)
        tied = bool(getattr(config, "tie_word_embeddings", False))
        heads = int(getattr(config, "num_attention_heads", 1))
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        return RowCost(
            per_token=float(max(0, weights - embeddings * (1 if tied else 2))),
            per_scored_token=float(embeddings),
            per_pair=2.0 * config.num_hidden_layers * heads * size,
        )

    def _decode(
        self, input_ids: Tensor, *, body: nn.Module | None = None, states: Tensor | None = None, **keywords: Any
    ) -> Tensor:  # [B, L, H] last hidden states
        body = self.causal_lm.base_model if body is None else body
        given = {"input_ids": input_ids} if states is None else {"inputs_embeds": states}
        found: Tensor = body(**given, use_cache=False, **keywords).last_hidden_state
        return found

    def _head(self) -> Head | None:
        head: Any = self.causal_lm.get_output_embeddings()
        if isinstance(head, QuantisedLinear):
            return Head(head.full_weight(), head.bias, self._scale, self._softcap)
        if type(head) is not nn.Linear:
            return None
        weight, bias = (each.to_local() if isinstance(each, DTensor) else each for each in (head.weight, head.bias))
        return Head(weight, bias, self._scale, self._softcap, self.tp)

    def parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under their names in the causal LM, tied ones once."""
        self.free_gathered()
        yield from self.causal_lm.named_parameters()

    def vocabulary_weights(self) -> list[nn.Parameter]:
        """Return the parameters of embeddings and output head, of which each row is a token's own."""
        ends = (self.causal_lm.get_input_embeddings(), self.causal_lm.get_output_embeddings())
        return [parameter for each in ends if each is not None for parameter in each.parameters()]

    @property
    def renamed(self) -> bool:
        """True if the checkpoint's names of tensors differ from the module's (fused experts, for example)."""
        return bool(getattr(self.causal_lm, "_weight_conversions", None))

    def to_checkpoint_names(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename and split full tensors by module name to those by checkpoint name, one after the other if possible."""
        if not self.renamed:
            yield from tensors
            return
        from transformers.core_model_loading import revert_weight_conversion

        alone = all(len(each.target_patterns) == 1 for each in cast(Any, self.causal_lm)._weight_conversions)  # noqa: SLF001
        for part in ({name: tensor} for name, tensor in tensors) if alone else (dict(tensors),):
            yield from revert_weight_conversion(self.causal_lm, part).items()

    def tensors_by_name(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters, and the buffers that belong into a checkpoint."""
        yield from self.parameters_by_name()
        for prefix, module in self.causal_lm.named_modules():
            transient = module._non_persistent_buffers_set  # noqa: SLF001  # torch has no public way
            for name, buffer in module.named_buffers(recurse=False):
                if name not in transient:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def described(self) -> dict[str, Tensor]:
        """Return :meth:`tensors_by_name`, and those of other stages without memory, in the order of the whole model."""
        mine = dict(self.tensors_by_name())
        if self.pipeline is None:
            return mine
        return {name: mine.get(name, empty) for name, (_, empty) in self.pipeline.places.items()}

    @cached_property
    def adapter_modules(self) -> dict[str, nn.Linear]:
        """The modules that have the matrices of adapters, found once: a model has thousands of modules with them."""
        return adapter_modules(self.causal_lm)

    def merged(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return tensors if self.lora is None else merged_tensors(tensors, self.lora)

    def free_gathered(self) -> None:
        """Free gathered weights: without a backward pass FSDP keeps them, and they would outlive new weights."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def load_policy_model(
    path: str,
    *,
    gradient_checkpointing: bool = False,
    layout: Layout | Literal["auto"] = "auto",
    lora: LoRA | None = None,
    seed: int = 0,
    sharded: bool = False,
    dtype: ComputeDtype = "float32",
    files: WeightFiles | None = None,
    layers: int | None = None,
) -> PolicyModel:
    """Load a causal LM from a folder or the hub on the CPU: in float32, and frozen weights in ``dtype``.

    Layout ``auto`` packs rows if the model allows it, and logs a warning if not. With ``lora`` the model is frozen and
    gets adapters, drawn from ``seed``. Nothing is drawn in a pass, neither dropout nor experts: the trained policy must
    be the one that is sampled from, and a training step is then a function of its batch alone. A ``sharded`` model gets
    memory and weights in :func:`shard` only, on the device, where it can
    (:func:`~engines.training.loading.empty_causal_lm`). Those of a plan (:mod:`engines.training.memory`) come from
    ``files``, instead of those of ``path``. ``layers`` are how many of the first ones it has.

    Raises:
        ConfigError: the model changes its logits in an unsupported way, cannot be packed although ``layout`` is
            ``packed``, or lacks the target modules of ``lora``; of a sharded one, a file of weights is missing or
            damaged, or a tensor is not there or of another shape; of a planned one, it needs weights to be made.
        OSError: there is no such model.
    """
    loaded = load_causal_lm(
        path, gradient_checkpointing=gradient_checkpointing, sharded=sharded, files=files, layers=layers
    )
    model = PolicyModel(loaded.causal_lm)
    if lora is not None:
        with _one_element_each(loaded):
            add_adapters(loaded.causal_lm, lora, seed=seed)
        model.lora = lora
        if lora.base == "int8":
            quantise(loaded.causal_lm)
    draw_nothing(model)
    _check_logits(model if loaded.files is None else PolicyModel(loaded.twin))
    choose_layout(model, layout, loaded)
    if dtype == "bfloat16":  # as a pass would cast them; only what is trained needs more digits
        for name, parameter in loaded.causal_lm.named_parameters():
            if not parameter.requires_grad and parameter.is_floating_point() and _as_published(name) not in model.kept:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _kept_in_float32(causal_lm: Any) -> frozenset[str]:
    """Return the names of tensors that are float32 in a model of any dtype.

    They are buffers, what transformers says, and what the family's code makes so (it does not say that).
    """
    from transformers.core_model_loading import build_glob_alternation

    patterns = list(causal_lm._get_dtype_plan(torch.bfloat16))  # noqa: SLF001  # as from_pretrained
    matching, _, _ = build_glob_alternation(patterns)
    weights = (name for name, _ in causal_lm.named_parameters() if patterns and matching.search(name))
    config = copy.deepcopy(causal_lm.config)
    config.dtype = torch.bfloat16
    with torch.device("meta"), _MarkFloat32():
        made = type(causal_lm)(config)
    own = (name for name, weight in made.named_parameters() if weight.dtype == torch.float64)
    return frozenset((*weights, *own, *(name for name, _ in causal_lm.named_buffers())))


class _MarkFloat32(TorchFunctionMode):
    """Makes tensors float64 that are asked for in float32, so that they differ from those of the default dtype.

    It concerns this thread alone; another default dtype would concern all.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in (torch.empty, torch.ones, torch.zeros) and given.get("dtype") == torch.float32:
            given["dtype"] = torch.float64
        return func(*args, **given)


def _as_published(name: str) -> str:
    return name.replace(".base_layer.", ".")


def load_causal_lm(
    path: str,
    *,
    gradient_checkpointing: bool,
    sharded: bool = False,
    files: WeightFiles | None = None,
    layers: int | None = None,
) -> LoadedModel:
    """Load a model of transformers in float32 on the CPU, with every dropout switched off; see the function above."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(path)
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if isinstance(value, float) and name.endswith(("dropout", "drop")):
                setattr(part, name, 0.0)
    if layers is not None:
        config = with_layers(config, layers)
    with model_loading_lock:
        loaded = empty_causal_lm(path, config, files) if sharded else None
        if loaded is None and files is not None:
            raise ConfigError(
                f"{config.model_type} is a mixture, or read as a whole: its memory is not planned", path="model_path"
            )
        if loaded is None:
            loaded = LoadedModel(AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32))
    causal_lm = loaded.causal_lm
    for module in causal_lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if gradient_checkpointing:
        enable = getattr(causal_lm, "activation_checkpointing_enable", causal_lm.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return loaded


def draw_nothing(model: nn.Module) -> None:
    """Take modules out of training mode, in which mixtures choose experts at random.

    Left in it are those whose activations are computed again, which transformers and reversible layers do in this mode
    only, and the bodies of models, which without it may change weights for inference (rwkv), or compute no gradients
    (xlstm).
    """
    from transformers import PreTrainedModel

    for module in model.modules():
        recomputed = getattr(module, "gradient_checkpointing", False) or hasattr(module, "backward_pass")
        module.training = bool(recomputed) or isinstance(module, PreTrainedModel)


def choose_layout(model: PolicyModel, layout: Layout | Literal["auto"], loaded: LoadedModel) -> None:
    """Set the layout, and check the files of a model without memory.

    Raises:
        ConfigError: the model cannot be packed although ``layout`` is ``packed``, or the files do not fit it.
    """
    if loaded.files is not None:
        empty = {name: each for name, each in stored_tensors(model.causal_lm).items() if each.is_meta}
        loaded.files.check({name: tuple(each.shape) for name, each in empty.items()})
        model.unread = loaded.files
    if layout == "padded":
        return
    # A model without memory is judged by its twin.
    judged = model if loaded.files is None else PolicyModel(loaded.twin)
    if reason := judged.pack():
        if layout == "packed":
            raise ConfigError(reason, path="layout", remedy="'padded', or 'auto'")
        _log.warning("rows are padded, not packed: %s", reason)
    elif judged is not model:
        model.causal_lm.set_attn_implementation(PACKED_ATTENTION)
        model.layout = judged.layout


@contextmanager
def _one_element_each(loaded: LoadedModel) -> Iterator[None]:
    """Let parameters without memory be views of one element on the CPU meanwhile.

    peft draws adapters on the device of the weight beside them: on the meta device they would get no values.
    """
    empty = [] if loaded.files is None else list(loaded.causal_lm.named_modules())
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    for _, module in empty:
        for name, parameter in list(module.named_parameters(recurse=False)):
            held.append((module, name, parameter))
            module.register_parameter(name, nn.Parameter(torch.zeros(()).expand(parameter.shape)))
    yield
    for module, name, parameter in held:
        parameter.requires_grad_(getattr(module, name).requires_grad)
        module.register_parameter(name, parameter)


def check_mesh(model: PolicyModel, shape: MeshShape, *, stages_per_rank: int = 1) -> None:
    """Raise :class:`ConfigError` unless :func:`shard` can divide the model over a mesh of this shape."""
    if shape.tp > 1 and model.lora is not None and model.lora.base != "float":
        raise ConfigError(
            f"mesh.tp = {shape.tp}: products with weights of 8 bits (lora.base = {model.lora.base!r}) are not divided",
            path="mesh.tp",
            remedy="use tp = 1, or lora.base = 'float'",
        )
    shape.check_model(model.causal_lm.config)
    if shape.cp > 1 and model.layout != "packed":
        raise ConfigError(
            f"mesh.cp = {shape.cp}: the rows of {model.architecture} are padded, and a padded row is not divided",
            path="mesh.cp",
            remedy="use cp = 1, or a model whose rows can be packed",
        )
    if shape.pp > 1:
        with model_loading_lock:
            check_layers(model, ranks=shape.pp, stages_per_rank=stages_per_rank)
    if shape.tp == 1:
        return
    head: Any = model.causal_lm.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"mesh.tp = {shape.tp}: the output head of {model.architecture} is no matrix but a {type(head).__name__}",
            path="mesh.tp",
            remedy="use tp = 1",
        )


def shard(
    model: PolicyModel,
    ranks: RankGroup,
    *,
    dtype: ComputeDtype,
    backend: str | None = None,
    stages_per_rank: int = 1,
) -> None:
    """Divide layers, products and experts over their ranks; shard experts, decoder layers and the rest over the others.

    Trained weights, gradients after reduction and optimizer state are float32; ``dtype`` is that of the computation.
    With a ``backend`` of ``torch.compile`` layers, and the passes over logits, are compiled.

    A model without memory gets its shards, and reads them, afterwards (:class:`~asyncrl.errors.ConfigError` if a file
    cannot be read).

    One rank that computes in float32 has nothing to shard or to cast, so its model is only moved to the device: FSDP
    would hold the weights twice and copy them before every forward pass (10% of an update of 8 rows, 135M parameters).
    """
    device = torch.device(ranks.mesh.device_type)
    model.cp = ranks.cp
    model.row_cost  # noqa: B018  while it is whole
    if ranks.tp is not None:
        model.tp = ranks.tp.get_group()
        divide_products(model.causal_lm, ranks.tp, divide_head=model.divides_head)
    if ranks.pp is not None:
        model.pipeline = divide_layers(
            model, ranks.pp, stages_per_rank=stages_per_rank, dtype=getattr(torch, dtype), device=device
        )
        model.stages.extend(model.pipeline.stages.values())
    names = set(model.causal_lm._no_split_modules or ())  # noqa: SLF001  # as transformers' own sharding plan does
    layers = [module for module in model.causal_lm.modules() if type(module).__name__ in names]
    if backend is not None:
        _compile(model, layers, backend)
    if ranks.world_size > 1 or dtype != "float32":
        units = [(module, ranks.mesh) for module in (*layers, *(model.stages or [model]))]
        if ranks.ep is not None:
            experts = experts_of(model.causal_lm)
            divide_experts(experts, ranks.ep)
            units = [*((module, ranks.expert_mesh) for module in experts), *units]
        if dtype != "float32":
            _shard([(module, ranks.mesh) for module in _kept_modules(model)], dtype="float32")
        _shard(units, dtype=dtype)
    elif model.unread is None:
        model.to(device)
    if model.unread is not None and model.planned_for is None:
        fill(model, model.causal_lm, model.unread, device=device)
        model.unread = None


def _kept_modules(model: PolicyModel) -> list[nn.Module]:
    """Return the outermost modules whose weights all stay in float32: FSDP casts those of a unit to one dtype.

    Raises:
        ConfigError: a weight that should stay so belongs to a module that has others.
    """
    left = {name for name, _ in model.causal_lm.named_parameters() if _as_published(name) in model.kept}
    found: list[nn.Module] = []
    for prefix, module in model.causal_lm.named_modules():
        names = {f"{prefix}.{name}" for name, _ in module.named_parameters()}
        if names and names <= left:
            found.append(module)
            left -= names
    if left:
        raise ConfigError(
            f"dtype is bfloat16: transformers keeps {min(left)} of {model.architecture} in float32, and FSDP would "
            "cast it with the other weights of its module",
            path="dtype",
            remedy="'float32'",
        )
    return found


def _shard(units: Iterable[tuple[nn.Module, DeviceMesh]], *, dtype: ComputeDtype) -> None:
    """Shard each module over its mesh, without what is sharded already; gradients are summed over all ranks.

    FSDP would average them over the mesh of each module. It casts weights alone: what families compute in float32
    (angles of positions, weights of experts) stays so.
    """
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module, mesh in units:
        # On one rank resharding between forward and backward frees nothing.
        reshard = None if mesh.size() > 1 else False
        sharded = fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=partial(_dimension, shards=mesh.size(-1)),
        )
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)


def _dimension(parameter: nn.Parameter, *, shards: int) -> Shard | None:
    """Return how a tensor is sharded: by rows, but experts that are too few for that by what each of them has."""
    few = parameter.ndim == 3 and local_shard(parameter).shape[0] % shards and parameter.shape[1] % shards == 0
    return Shard(1) if few else None


def _compile(model: PolicyModel, layers: Iterable[Any], backend: str) -> None:
    """Compile every decoder layer, and what is done to logits: at the second length of a stream, for any length.

    With ``dynamic=True`` the sizes of the model, which never change, would be variables of the code, too.
    Packed attention stays as it is, since how rows divide a stream is no shape of a tensor; so do the hooks of FSDP,
    which lie around a layer's ``forward``. torch compiles nothing inside a checkpoint, as transformers' layers have in
    ``forward``, so it lies around the compiled code instead. The class that FSDP gives a layer would have another
    ``forward`` around it, to be compiled as well: this comes before.
    """
    from transformers import AttentionInterface

    model.backend = backend
    if model.layout == "packed":
        AttentionInterface.register(_OUTSIDE, torch.compiler.disable(packed_attention))
        model.causal_lm.set_attn_implementation(_OUTSIDE)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
        if getattr(layer, "gradient_checkpointing", False):
            layer.gradient_checkpointing = False
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


_OUTSIDE = f"{PACKED_ATTENTION}_outside"
"""Name of the packed attention that compiled layers call."""


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor (the same memory), or the tensor itself if it is not sharded."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _foreign_attention(config: Any) -> str:
    """Return why packed attention does not cover the model's layers: neither full nor sliding-window; else ``""``."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"{config.model_type} has layers of {', '.join(sorted(kinds))}"
    if getattr(config, "attention_chunk_size", None):
        return f"{config.model_type} attends in chunks"
    return ""


def _windows(config: Any, *, layers: int) -> list[int]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return [window for kind in kinds if kind == "sliding_attention" and window]


def _check_logits(model: PolicyModel) -> None:
    ids = torch.arange(min(4, model.vocabulary)).unsqueeze(0)
    with torch.no_grad():
        expected = model.causal_lm(input_ids=ids, use_cache=False).logits
        states = model.causal_lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found = model.logits_of(states)
    if expected.shape != found.shape or not torch.allclose(expected.float(), found.float(), rtol=1e-3, atol=1e-4):
        raise ConfigError(
            f"{model.architecture} changes its logits by more than head, scale and softcap",
            path="model_path",
            remedy="use an architecture whose logits are lm_head(hidden), scaled or soft-capped",
        )
