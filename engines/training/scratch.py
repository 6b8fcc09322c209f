"""A tiny language model made on the spot: random weights, and a tokenizer trained on the demonstrations.

It writes a complete Hugging Face folder, so everything that loads a real model loads this one. What makes it small
enough to learn on two processor cores within minutes:

* a byte-level BPE trained on the rendered demonstrations, whose merges may cross words: recurring scaffolding (the
  JSON of a tool call) becomes one or two tokens, while digits always stay single;
* a chat template of one token per turn border. Tools are not declared in the prompt: a model from scratch knows them
  from its demonstrations only;
* tied embeddings and wide initial weights, which make copying a token easy to learn.

Any text can be encoded: what the merges do not cover falls back to bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError
from asyncrl.interfaces import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "make", "make_scratch_model", "make_scratch_tokenizer"]

END, PAD = "<|end|>", "<|pad|>"
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
_SPECIAL_TOKENS = [PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]

CHAT_TEMPLATE = """
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
""".strip()
"""Turns are ``<|role|>content<|end|>``; calls are written the way Hermes and Qwen models write them."""


def make(folder: Path, *, seed: int, demonstrations: Callable[[int], list[Message]] | None, **options: Any) -> None:
    """Model source ``scratch``: see :func:`make_scratch_model` for the options.

    Raises:
        ConfigError: there are no demonstrations to make a tokenizer from.
    """
    if demonstrations is None:
        raise ConfigError(
            "a model from scratch needs demonstrations: its tokenizer is made from them",
            path="model.source",
            remedy="choose an environment with demonstrations, or a pretrained model",
        )
    conversations = [demonstrations(index) for index in range(int(options.pop("tokenizer_conversations", 512)))]
    make_scratch_model(folder, seed=seed, conversations=conversations, **options)


def make_scratch_model(
    folder: Path,
    *,
    conversations: Sequence[Sequence[Message]],
    seed: int = 0,
    architecture: str = "llama",
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    intermediate_size: int = 352,
    max_position: int = 512,
    vocab_size: int = 512,
    rope_theta: float = 10_000.0,
    initializer_range: float = 0.05,
) -> None:
    """Write config, random weights (float32), tokenizer and generation config into ``folder``.

    Raises:
        ConfigError: an option that cannot be used.

    Args:
        folder: made if missing.
        conversations: texts the tokenizer is trained on.
        seed: of the weights; the tokenizer depends on the conversations alone.
        architecture: a Hugging Face ``model_type``: llama, qwen2, qwen3 or mistral.
        hidden_size: width; with ``heads``, of equal size.
        layers: depth.
        heads: attention heads.
        intermediate_size: width of the MLP.
        max_position: longest sequence in tokens.
        vocab_size: upper bound; merging stops early when nothing recurs.
        rope_theta: base of the rotary positions; small ones suit short sequences.
        initializer_range: standard deviation of the initial weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = make_scratch_tokenizer(conversations, vocab_size=vocab_size, max_position=max_position)
    if hidden_size % heads:
        raise ConfigError(
            f"hidden_size={hidden_size} is no multiple of heads={heads}",
            path="model.options.hidden_size",
            remedy="heads are of equal size: choose a multiple",
        )
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"no model can be made of architecture {architecture!r}",
            path="model.options.architecture",
            remedy=f"one of {', '.join(_ARCHITECTURES)}",
        )
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=max_position,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_length=max_position
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))


def make_scratch_tokenizer(
    conversations: Iterable[Sequence[Message]], *, vocab_size: int = 512, max_position: int = 512
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the rendered conversations; digits are never merged, special tokens never split.

    Raises:
        ConfigError: ``vocab_size`` has no room for the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(_SPECIAL_TOKENS):
        raise ConfigError(
            f"vocab_size is {vocab_size}",
            path="model.options.vocab_size",
            remedy=f"at least {len(alphabet) + len(_SPECIAL_TOKENS)}: every byte is a token",
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_texts(conversations), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=_SPECIAL_TOKENS[2:],
        model_max_length=max_position,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _texts(conversations: Iterable[Sequence[Message]]) -> Iterator[str]:
    """The conversations as the template renders them, without the special tokens between."""
    from transformers.utils.chat_template_utils import render_jinja_template

    border = re.compile("|".join(re.escape(token) for token in _SPECIAL_TOKENS))
    for conversation in conversations:
        rendered = render_jinja_template([list(conversation)], chat_template=CHAT_TEMPLATE)[0][0]
        yield from (text for text in border.split(rendered) if text)
