"""Two tokenizers with different chat templates, small enough to make on the spot."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.agents.calculator import CalculatorFactory
from asyncrl.agents.chat import ChatRenderer
from engines.training.scratch import make_scratch_tokenizer

# ChatML as Qwen models write it: a default system turn, declared tools, answers of tools gathered in one user turn.
CHATML = """
{%- if tools -%}
{{ '<|im_start|>system\nTools: ' + (tools | map(attribute='function.name') | join(', ')) + '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif -%}
{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""


@pytest.fixture(scope="session")
def factory() -> CalculatorFactory:
    return CalculatorFactory()


@pytest.fixture(scope="session")
def scratch(factory: CalculatorFactory) -> ChatRenderer:
    return ChatRenderer(make_scratch_tokenizer([factory.demonstration(index) for index in range(200)]))


@pytest.fixture(scope="session")
def chatml() -> ChatRenderer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHATML
    return ChatRenderer(tokenizer)
