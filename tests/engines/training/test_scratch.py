"""A model from scratch loads like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.errors import ConfigError
from asyncrl.rollout.chat import ChatRenderer
from engines.training import scratch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scratch")
    scratch.make(made, seed=0, demonstrations=CalculatorFactory().demonstration, hidden_size=32, layers=2)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


def test_the_folder_is_a_complete_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert model.generation_config.pad_token_id == tokenizer.convert_tokens_to_ids("<|pad|>")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    prompt = ChatRenderer(tokenizer).prompt([{"role": "user", "content": "3+4"}])
    assert model(torch.tensor([prompt])).logits.isfinite().all()


def test_seeds_give_different_weights_and_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    def weights(of: Path) -> torch.Tensor:
        return AutoModelForCausalLM.from_pretrained(of).get_input_embeddings().weight

    state = torch.random.get_rng_state()
    for seed in (0, 1):
        demonstrations = CalculatorFactory().demonstration
        scratch.make(tmp_path / str(seed), seed=seed, demonstrations=demonstrations, hidden_size=32, layers=2)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(weights(tmp_path / "0"), weights(folder))
    assert not torch.equal(weights(tmp_path / "1"), weights(folder))
    assert (tmp_path / "1/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_recurring_text_is_few_tokens_and_digits_are_single(tokenizer: PreTrainedTokenizerBase) -> None:
    factory = CalculatorFactory()
    encoded = [ChatRenderer(tokenizer).encode_conversation(factory.demonstration(index)) for index in range(200)]
    assert max(len(each.token_ids) for each in encoded) <= 64
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    assert tokenizer.encode("9876543210", add_special_tokens=False) == digits[::-1]
    call = '<tool_call>\n{"name": "calculator", "arguments": {"a": 12, "operator": "+", "b": 3}}\n</tool_call>'
    assert len(tokenizer.encode(call, add_special_tokens=False)) <= 8


@given(text=st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_text_survives(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    conversations = [CalculatorFactory().demonstration(index) for index in range(20)]
    scratch.make_scratch_model(
        tmp_path, conversations=conversations, architecture=architecture, hidden_size=32, layers=1, heads=2
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == architecture
    assert model(torch.tensor([[7, 8, 9]])).logits.shape == (1, 3, model.config.vocab_size)


def test_options_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    conversations = [CalculatorFactory().demonstration(index) for index in range(5)]
    with pytest.raises(ConfigError, match="needs demonstrations"):
        scratch.make(tmp_path, seed=0, demonstrations=None)
    with pytest.raises(ConfigError, match="vocab_size is 100"):
        scratch.make_scratch_model(tmp_path, conversations=conversations, vocab_size=100)
    for size, heads in ((30, 4), (12, 4), (32, 0), (0, 4)):  # of 12, each head would have three
        with pytest.raises(ConfigError, match=f"hidden_size={size} is not a multiple of twice heads={heads}"):
            scratch.make_scratch_model(tmp_path, conversations=conversations, hidden_size=size, heads=heads)
    with pytest.raises(ConfigError, match="'nonsense'"):
        scratch.make_scratch_model(tmp_path, conversations=conversations, architecture="nonsense")
