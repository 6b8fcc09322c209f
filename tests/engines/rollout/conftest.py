"""Tiny models made on the spot, and a reference that computes log-probs the slow way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.interfaces import Generation, GenerationRequest, SamplingParams
from engines.rollout.logits import LogitRules
from engines.rollout.transformers.engine import TransformersEngine

VOCABULARY = 67
CONTEXT = 256


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


def make_model(kind: str, *, seed: int, tied: bool = False, **options: Any) -> Any:
    """A model with random weights, spread widely enough that its distributions are far from uniform."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "mamba": (transformers.MambaConfig, transformers.MambaForCausalLM),
    }[kind]
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.4,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    return model_class(config_class(**{**settings, **options})).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``folder_of("llama", seed=0)`` is a model folder; made once."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(kind: str = "llama", *, seed: int = 0, **options: Any) -> Path:
        key = (kind, seed, *sorted((name, str(value)) for name, value in options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            make_model(kind, seed=seed, **options).save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def model_of() -> Callable[..., Any]:
    return make_model


def log_prob_of(logits: Sequence[float], token: int, sampling: SamplingParams) -> float:
    """Plain Python: log-prob of ``token`` after temperature, top-k and top-p; greedy: untempered."""
    if sampling.temperature == 0.0:
        weights = dict(enumerate(logits))
    else:
        weights = {i: value / sampling.temperature for i, value in enumerate(logits)}
        ranked = sorted(weights, key=lambda i: -weights[i])
        if sampling.top_k:
            ranked = ranked[: sampling.top_k]
        top = weights[ranked[0]]
        total = math.fsum(math.exp(weights[i] - top) for i in ranked)
        kept, mass = [], 0.0
        for i in ranked:
            if mass >= sampling.top_p * total and sampling.top_p < 1.0:
                break
            kept.append(i)
            mass += math.exp(weights[i] - top)
        weights = {i: weights[i] for i in kept}
    if token not in weights:
        return -math.inf
    top = max(weights.values())
    return weights[token] - top - math.log(math.fsum(math.exp(value - top) for value in weights.values()))


def changed_logits(logits: Sequence[float], prompt: list[int], sampled: list[int], how: LogitRules) -> list[float]:
    """Plain Python, a token at a time: what a request makes of the logits of the token after ``sampled``."""
    sampling, values = how.sampling, list(logits)
    for token in range(len(values)):
        value = values[token] + dict(sampling.logit_bias).get(token, 0.0)
        if token in prompt + sampled:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= sampling.frequency_penalty * sampled.count(token) + sampling.presence_penalty * (token in sampled)
        if sampling.allowed_token_ids and token not in sampling.allowed_token_ids:
            value = -math.inf
        for word in how.bad_words:
            begun = sampled[len(sampled) - len(word) + 1 :] if len(word) <= len(sampled) + 1 else None
            if word[-1] == token and begun == word[:-1]:
                value = -math.inf
        if token in how.end_token_ids and len(sampled) < sampling.min_tokens:
            value = -math.inf
        values[token] = value
    if sampling.min_p and sampling.temperature and max(values) > -math.inf:
        weights = [math.exp((value - max(values)) / sampling.temperature) for value in values]
        values = [
            value if weight >= sampling.min_p else -math.inf for value, weight in zip(values, weights, strict=True)
        ]
    return values


@pytest.fixture(scope="session")
def plain_logits() -> Callable[..., list[float]]:
    return changed_logits


@pytest.fixture(scope="session")
def plain_log_probs() -> Callable[..., list[float]]:
    """Log-probs of a generation by one forward pass over prompt and tokens, without any cache."""

    def compute(model: Any, request: GenerationRequest, tokens: Sequence[int]) -> list[float]:
        prompt = request.prompt_token_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].double()
        rows = logits[len(prompt) - 1 : -1].tolist()
        return [log_prob_of(row, token, request.sampling) for row, token in zip(rows, tokens, strict=True)]

    return compute


@pytest.fixture(scope="session")
def mixed_log_probs() -> Callable[..., list[float]]:
    """Replay with transformers' own cache: each token's keys and values under the weights that read it.

    With the cache kept, a sampled token is read by the step that samples the next one, so by that one's version.
    """

    def compute(models: Any, request: GenerationRequest, got: Generation) -> list[float]:
        from transformers import DynamicCache

        cache = DynamicCache()
        log_probs = []
        pending = list(request.prompt_token_ids)
        for token, version in zip(got.token_ids, got.weight_versions, strict=True):
            with torch.no_grad():
                out = models[version](input_ids=torch.tensor([pending]), past_key_values=cache, use_cache=True)
            log_probs.append(float(out.logits[0, -1].double().log_softmax(-1)[token]))
            pending = [token]
        return log_probs

    return compute


@pytest.fixture(scope="session")
def truncated_log_prob() -> Callable[[Sequence[float], int, SamplingParams], float]:
    return log_prob_of


@pytest.fixture(scope="session")
def collect() -> Callable[..., Any]:
    """``await collect(engine, request)`` puts the chunks of a request together, and checks their form."""

    async def run(engine: TransformersEngine, request: GenerationRequest) -> Generation:
        tokens: list[int] = []
        log_probs: list[float] = []
        versions: list[int] = []
        reason = None
        scored: tuple[Any, Any] = ((), ())
        async for chunk in engine.generate(request):
            assert reason is None, "a chunk came after the last one"
            assert len(chunk.token_ids) == len(chunk.log_probs) == len(chunk.weight_versions)
            tokens += chunk.token_ids
            log_probs += chunk.log_probs
            versions += chunk.weight_versions
            reason = chunk.finish_reason
            if chunk.prompt_log_probs:
                assert not scored[0], "prompts are scored once"
                scored = chunk.prompt_log_probs, chunk.prompt_top_log_probs
        assert reason is not None
        return Generation(
            token_ids=tuple(tokens),
            log_probs=tuple(log_probs),
            weight_versions=tuple(versions),
            finish_reason=reason,
            prompt_log_probs=scored[0],
            prompt_top_log_probs=scored[1],
        )

    return run


@pytest.fixture(scope="session")
def request_of() -> Callable[..., GenerationRequest]:
    def make(name: str | int, prompt: Sequence[int], tokens: int, **sampling: Any) -> GenerationRequest:
        return GenerationRequest(
            request_id=str(name),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=tokens, **sampling),
        )

    return make


# A model whose version v can only say v: a wrong label shows at once. The layers add nothing, every embedding is the
# same vector of ones, so only the head decides.


@pytest.fixture(scope="session")
def telltale(
    folder_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[[int], Any]]:
    model = _load(folder_of())

    def weights(version: int) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.clone() for name, tensor in model.named_parameters()}
        for name, tensor in tensors.items():
            if "o_proj" in name or "down_proj" in name:
                tensor.zero_()
            elif "embed_tokens" in name or "norm" in name:
                tensor.fill_(1.0)
            elif name == "lm_head.weight":
                tensor.fill_(-1.0)
                tensor[version] = 1.0
        return tensors

    folder = tmp_path_factory.mktemp("telltale")
    model.load_state_dict(weights(0))
    model.save_pretrained(folder)
    return folder, weights


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
