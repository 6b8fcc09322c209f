"""A causal LM as a model repository brings it along: its own classes, its own attention, nothing registered upstream.

Attention is linear with a decay, so a token's state is a running sum over everything before it: a model that cannot
know where a packed row begins. The head is a module of two matrices, not one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

__all__ = ["DecayConfig", "DecayForCausalLM", "register"]


class DecayConfig(PreTrainedConfig):
    model_type = "asyncrl_test_decay"

    vocab_size: int = 61
    hidden_size: int = 16
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    initializer_range: float = 0.2
    tie_word_embeddings: bool = False


class DecayLayer(nn.Module):
    def __init__(self, config: DecayConfig) -> None:
        super().__init__()
        self.mix = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        value, gate = self.mix(states).chunk(2, dim=-1)
        place = torch.arange(states.shape[1], device=states.device, dtype=states.dtype)
        decay = (0.5 ** (place[:, None] - place[None, :]).clamp(min=0)).tril()
        mixed: Tensor = states + self.out(torch.tanh(decay @ value) * torch.sigmoid(gate))
        return mixed


class DecayPreTrained(PreTrainedModel):
    config_class = DecayConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar = ["DecayLayer"]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)


class DecayModel(DecayPreTrained):
    def __init__(self, config: DecayConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecayLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids: Tensor, **_: Any) -> BaseModelOutputWithPast:
        states = self.embed_tokens(input_ids)
        for layer in self.layers:
            states = layer(states)
        return BaseModelOutputWithPast(last_hidden_state=states)


class TwoMatrices(nn.Module):
    def __init__(self, config: DecayConfig) -> None:
        super().__init__()
        self.first = nn.Linear(config.hidden_size, config.hidden_size)
        self.second = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self.second(torch.tanh(self.first(states)))
        return logits


class DecayForCausalLM(DecayPreTrained, GenerationMixin):
    def __init__(self, config: DecayConfig) -> None:
        super().__init__(config)
        self.model = DecayModel(config)
        self.lm_head = TwoMatrices(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids).last_hidden_state))


def register() -> None:
    """Make the classes known in this process, as loading a repository with code of its own does."""
    AutoConfig.register(DecayConfig.model_type, DecayConfig, exist_ok=True)
    AutoModelForCausalLM.register(DecayConfig, DecayForCausalLM, exist_ok=True)
