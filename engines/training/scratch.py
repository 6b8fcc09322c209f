"""Model source ``scratch``: a tiny model with random weights, and a tokenizer trained on demonstrations.

It is a complete Hugging Face folder, which every engine loads like any other model. It is small enough to learn on two
processor cores within minutes:

* The tokenizer is a byte-level BPE trained on the rendered demonstrations, whose merges may cross words: recurring text
  (the JSON of a tool call) becomes one or two tokens, while digits stay single. Other text falls back to bytes.
* The chat template has one token per turn border. Tools are not declared in the prompt: the model learns them from
  its demonstrations.
* Tied embeddings and wide initial weights make copying a token easy to learn.
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


END, PAD = "<|end|>", "<|pad|>"
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
_SPECIAL_TOKENS = [PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
_LEAST_VOCABULARY = 256 + len(_SPECIAL_TOKENS)

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
"""Turns are ``<|role|>content<|end|>``; tool calls have the format of Hermes and Qwen models."""


def make(
    folder: Path,
    *,
    seed: int,
    demonstrations: Callable[[int], list[Message]] | None,
    tokenizer_conversations: int = 512,
    architecture: str = "llama",
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    intermediate_size: int = 352,
    max_position: int = 1024,
    vocab_size: int = 512,
    rope_theta: float = 10_000.0,
    initializer_range: float = 0.05,
    tie_word_embeddings: bool = True,
) -> None:
    """Write config, random weights (float32), tokenizer and generation config into ``folder``; make it if missing.

    The tokenizer is trained on the first ``tokenizer_conversations`` of the demonstrations; ``vocab_size`` is an upper
    bound, since merging stops early when no pair recurs. ``architecture`` is a Hugging Face ``model_type``: llama,
    qwen2, qwen3 or mistral. ``hidden_size`` is a multiple of ``2 * heads``, ``max_position`` in tokens. ``rope_theta``
    is the base of the rotary embeddings: small ones suit short sequences. ``initializer_range`` is the standard
    deviation of the initial weights. With ``tie_word_embeddings`` embeddings and output head are one matrix.

    Raises:
        ConfigError: an option cannot be used, or there are no demonstrations.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    check_options(folder, demonstrations=demonstrations, hidden_size=hidden_size, heads=heads, vocab_size=vocab_size,
                  architecture=architecture)  # fmt: skip
    assert demonstrations is not None
    conversations = [demonstrations(index) for index in range(tokenizer_conversations)]
    tokenizer = make_scratch_tokenizer(conversations, vocab_size=vocab_size, max_position=max_position)
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
        tie_word_embeddings=tie_word_embeddings,
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


def check_options(
    folder: Path,
    *,
    demonstrations: Callable[[int], list[Message]] | None,
    hidden_size: int = 128,
    heads: int = 4,
    architecture: str = "llama",
    vocab_size: int = 512,
    **others: object,
) -> None:
    """Raise ConfigError unless :func:`make` can make a model from these arguments."""
    del folder, others
    if heads < 1 or hidden_size < 1 or hidden_size % (2 * heads):
        raise ConfigError(
            f"hidden_size={hidden_size} is not a multiple of twice heads={heads}",
            path="model.options.hidden_size",
            remedy="1 or more heads, all of one even size, since rotary positions turn pairs: choose a multiple",
        )
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture!r} is not supported",
            path="model.options.architecture",
            remedy=f"one of {', '.join(_ARCHITECTURES)}",
        )
    if vocab_size < _LEAST_VOCABULARY:
        raise ConfigError(
            f"vocab_size is {vocab_size}",
            path="model.options.vocab_size",
            remedy=f"at least {_LEAST_VOCABULARY}: every byte is a token",
        )
    try:
        (demonstrations or _no_demonstration)(0)
    except ConfigError as error:
        raise ConfigError(
            f"a model from scratch needs demonstrations, also without a warm start: its tokenizer is trained on them; "
            f"{error}",
            path="model.source",
            remedy="choose an environment with demonstrations, give them (env.options.demonstrations; in Python, the "
            "argument demonstrations), or choose a pretrained model (model.path)",
        ) from error


make.check_options = check_options  # type: ignore[attr-defined]


def _no_demonstration(index: int) -> list[Message]:
    raise ConfigError(f"there is no demonstration {index}")


def make_scratch_model(
    folder: Path, *, conversations: Sequence[Sequence[Message]], seed: int = 0, **options: Any
) -> None:
    """Make a model as :func:`make` does, its tokenizer from all of the ``conversations``."""
    given = [list(conversation) for conversation in conversations]
    make(folder, seed=seed, demonstrations=given.__getitem__, tokenizer_conversations=len(given), **options)


def make_scratch_tokenizer(
    conversations: Iterable[Sequence[Message]], *, vocab_size: int = 512, max_position: int = 1024
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the rendered conversations; digits are never merged, special tokens never split."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
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
    from transformers.utils.chat_template_utils import render_jinja_template

    border = re.compile("|".join(re.escape(token) for token in _SPECIAL_TOKENS))
    for conversation in conversations:
        rendered = render_jinja_template([list(conversation)], chat_template=CHAT_TEMPLATE)[0][0]
        yield from (text for text in border.split(rendered) if text)
