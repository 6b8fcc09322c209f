"""A transformers causal LM as the trainer needs it: token scores instead of logits, sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.errors import ConfigError
from engines.loading import one_at_a_time
from engines.training.token_log_probs import Extras, TokenScores, token_log_probs

__all__ = ["ComputeDtype", "PolicyModel", "load_policy_model", "local_shard", "shard"]

ComputeDtype = Literal["float32", "bfloat16"]


class PolicyModel(nn.Module):
    """Scores chosen tokens of padded rows.

    Only the hidden states that predict a wanted token reach the output head, which for large vocabularies is most of
    the work saved. Rows are padded on the right and attention is causal, so no token ever sees padding and no
    attention mask is needed: the fastest attention kernels apply.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.architecture = type(causal_lm).__name__  # before sharding gives the class another name
        config: Any = causal_lm.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        # What some families do to the logits after the head: gemma caps, granite divides, cohere multiplies.
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def forward(
        self,
        input_ids: Tensor,
        predictors: Tensor,
        targets: Tensor,
        *,
        extras: Extras = "none",
        temperature: float = 1.0,
    ) -> TokenScores:
        """Score N tokens.

        Args:
            input_ids: [B, L] int64, padded on the right with any valid id.
            predictors: [N] positions in the flattened [B * L], each one before its target.
            targets: [N] int64, the tokens there.
            extras: see :data:`~engines.training.token_log_probs.Extras`.
            temperature: divides the logits.
        """
        states = self.causal_lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        hidden = states.flatten(0, 1).index_select(0, predictors)
        return token_log_probs(
            hidden,
            targets,
            logits_of=self.logits_of,
            vocabulary=self.vocabulary,
            extras=extras,
            temperature=temperature,
        )

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[N, V] logits of hidden states [N, H]."""
        head: Any = self.causal_lm.get_output_embeddings()
        logits: Tensor = head(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their names in the causal LM, tied ones once."""
        self.free_gathered()
        yield from self.causal_lm.named_parameters()

    @property
    def renamed(self) -> bool:
        """Whether the checkpoint names its tensors differently from the module (fused experts, for example)."""
        return bool(getattr(self.causal_lm, "_weight_conversions", None))

    def to_checkpoint_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors by module name to full tensors by checkpoint name."""
        renamed: dict[str, Tensor] = revert_weight_conversion(self.causal_lm, tensors)
        return renamed

    def tensors_by_name(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, and the buffers that belong into a checkpoint."""
        yield from self.parameters_by_name()
        for prefix, module in self.causal_lm.named_modules():
            transient = module._non_persistent_buffers_set  # noqa: SLF001  # torch has no public question for this
            for name, buffer in module.named_buffers(recurse=False):
                if name not in transient:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def free_gathered(self) -> None:
        """Hold only shards: without a backward pass FSDP keeps what it gathered, which would outlive new weights."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def load_policy_model(path: str, *, gradient_checkpointing: bool = False) -> PolicyModel:
    """Load a causal LM from a folder or the hub, in float32 on the CPU.

    Dropout is switched off wherever the config names it: the policy that is trained must be the policy that is
    sampled from, and a training step is then a function of its batch alone.

    Raises:
        ConfigError: the model computes logits in a way that is not covered here.
        OSError: there is no such model.
    """
    config: Any = AutoConfig.from_pretrained(path)
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if isinstance(value, float) and name.endswith(("dropout", "pdrop")):
                setattr(part, name, 0.0)
    with one_at_a_time:
        causal_lm: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    for module in causal_lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if gradient_checkpointing:
        enable = getattr(causal_lm, "activation_checkpointing_enable", causal_lm.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    model = PolicyModel(causal_lm)
    model.train()
    _check_logits(model)
    return model


def shard(model: PolicyModel, mesh: DeviceMesh, *, dtype: ComputeDtype) -> None:
    """Shard every decoder layer, then the rest, over ``mesh``.

    Weights, gradients after reduction and optimizer state are float32. ``bfloat16`` computes in bfloat16.

    One rank that computes in float32 has nothing to shard or to cast, so its model is only moved to the device: FSDP
    would hold the weights twice and copy them before every forward pass (10% of an update of 8 rows, 135M parameters).
    """
    if mesh.size() == 1 and dtype == "float32":
        model.to(mesh.device_type)
        return
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # On one rank resharding between forward and backward frees nothing.
    reshard = None if mesh.size() > 1 else False
    layers = set(model.causal_lm._no_split_modules or ())  # noqa: SLF001  # transformers' own sharding plan reads it so
    for module in model.causal_lm.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (the same memory), or the tensor itself."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_logits(model: PolicyModel) -> None:
    """The head applied to single hidden states must give what the model itself gives."""
    ids = torch.arange(min(4, model.vocabulary)).unsqueeze(0)
    with torch.no_grad():
        expected = model.causal_lm(input_ids=ids, use_cache=False).logits
        states = model.causal_lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found = model.logits_of(states)
    if expected.shape != found.shape or not torch.allclose(expected.float(), found.float(), rtol=1e-3, atol=1e-4):
        raise ConfigError(
            f"{model.architecture} does more to its logits than the trainer knows of (head, scale, softcap)",
            path="model_path",
            remedy="use an architecture whose logits are lm_head(hidden), scaled or soft-capped",
        )
