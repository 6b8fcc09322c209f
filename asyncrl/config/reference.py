"""Every key of a configuration with its type, default, range and description, as the sections declare them."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key.

    Attributes:
        name: dotted, ``trainer.lr``; its unit is part of it.
        table: name of its table (empty for the first keys of a file), ``about`` what that is.
        type: in words; ``default`` as a file has it, ``required`` or ``none``; ``range`` empty without bounds.
        choices: values of a closed list.
        text: what it does.
    """

    name: str
    table: str
    about: str
    type: str
    default: str
    range: str
    choices: tuple[str, ...]
    text: str


def keys_of(model: type[BaseModel], table: str = "") -> Iterator[Key]:
    """Yield the keys of a section, then those of the sections in it.

    >>> from asyncrl.config import Config
    >>> next(key for key in keys_of(Config) if key.name == "max_staleness").default
    '1'
    """
    prefix = f"{table}." if table else ""
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            sections.append((f"{prefix}{name}", section))
        if section is None or field.default is None:
            yield Key(
                name=f"{prefix}{name}",
                table=table,
                about=_text(model.__doc__),
                type=_type(field.annotation),
                default=_default(field),
                range=_range(field),
                choices=_choices(field.annotation),
                text=_text(field.description),
            )
    for name, section in sections:
        yield from keys_of(section, name)


OTHER_NAMES: Mapping[str, tuple[str, str, str]] = {
    "steps": ("trainer.total_training_steps", "max_steps", "max_steps"),
    "max_staleness": ("async_training.staleness_threshold", "", "max_off_policy_steps, max_async_level"),
    "model.dtype": ("rollout.dtype", "bf16, fp16", ""),
    "model.path": ("actor_rollout_ref.model.path", "model, model_name_or_path", "model.name"),
    "env.options.files": ("data.train_files", "train_dataset", ""),
    "env.options.held_out": ("data.val_files", "eval_dataset", ""),
    "env.options.max_prompt_tokens": ("data.max_prompt_length", "max_prompt_length", ""),
    "env.options.reward": ("custom_reward_function", "reward_funcs, reward_weights", ""),
    "trainer.group_size": ("rollout.n", "num_generations", "rollouts_per_example"),
    "trainer.groups_per_step": ("data.train_batch_size", "per_device_train_batch_size, generation_batch_size", ""),
    "trainer.num_mini_batches": ("ppo_mini_batch_size", "steps_per_generation", ""),
    "trainer.epochs": ("ppo_epochs", "num_iterations", ""),
    "trainer.max_tokens_per_microbatch": ("ppo_max_token_len_per_gpu, ppo_micro_batch_size_per_gpu", "", ""),
    "trainer.lr": ("optim.lr", "learning_rate", "optim.lr"),
    "trainer.warmup_steps": ("optim.lr_warmup_steps", "warmup_steps, warmup_ratio", ""),
    "trainer.max_grad_norm": ("grad_clip", "max_grad_norm", ""),
    "trainer.gradient_checkpointing": ("enable_gradient_checkpointing", "gradient_checkpointing", ""),
    "trainer.lora": ("model.lora_rank, model.lora_alpha, model.target_modules", "peft_config", ""),
    "trainer.world_size": ("trainer.n_gpus_per_node, trainer.nnodes", "num_processes", ""),
    "rollout.engine": ("rollout.name", "use_vllm, vllm_mode", ""),
    "rollout.options": (
        "rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization",
        "vllm_tensor_parallel_size, vllm_gpu_memory_utilization",
        "",
    ),
    "rollout.max_new_tokens": ("data.max_response_length", "max_completion_length", "max_tokens"),
    "rollout.max_seq_len": ("rollout.max_model_len", "vllm_max_model_length", "seq_len"),
    "algorithm.advantage": ("algorithm.adv_estimator, norm_adv_by_std_in_grpo", "scale_rewards", ""),
    "algorithm.loss": ("policy_loss.loss_mode", "loss_type, importance_sampling_level", ""),
    "algorithm.loss_agg_mode": ("loss_agg_mode", "loss_type", ""),
    "algorithm.loss_options": (
        "clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c",
        "epsilon, epsilon_high, delta, sapo_temperature_pos, sapo_temperature_neg",
        "",
    ),
    "algorithm.correction": (
        "rollout_is, rollout_rs",
        "vllm_importance_sampling_correction, vllm_importance_sampling_mode",
        "",
    ),
    "algorithm.correction_options": (
        "rollout_is_threshold, rollout_rs_threshold",
        "vllm_importance_sampling_clip_max",
        "",
    ),
    "algorithm.kl_coef": ("kl_loss_coef, use_kl_loss", "beta", "kl_tau"),
    "algorithm.kl_estimator": ("kl_loss_type, algorithm.kl_penalty", "", ""),
    "algorithm.kl_placement": ("use_kl_in_reward", "", ""),
    "algorithm.entropy_coef": ("entropy_coeff", "", ""),
    "critic.gae_lambda": ("algorithm.lam", "lam", ""),
    "eval.every": ("trainer.test_freq", "eval_steps, eval_strategy", ""),
    "eval.on_start": ("trainer.val_before_train", "eval_on_start", ""),
    "checkpoint.every": ("trainer.save_freq", "save_steps, save_strategy", ""),
    "checkpoint.keep_last": ("trainer.max_actor_ckpt_to_keep", "save_total_limit", ""),
    "telemetry.trackers": ("trainer.logger", "report_to", ""),
}
"""Keys that have another name in verl, TRL or prime-rl. Values may differ: docs/migrating-from-verl.md and -trl.md."""


def keys_named(word: str) -> list[str]:
    """Return the keys that have this name in another system, with or without the tables before it.

    >>> keys_named("actor_rollout_ref.rollout.n"), keys_named("num_generations")
    (['trainer.group_size'], ['trainer.group_size'])
    """
    return [
        key
        for key, systems in OTHER_NAMES.items()
        if any(
            word == name or f".{word}".endswith(f".{name}") or (len(word) > 1 and f".{name}".endswith(f".{word}"))
            for name in ", ".join(filter(None, systems)).split(", ")
        )
    ]


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the section behind a field, also of an optional one."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join("`none`" if each is type(None) else _type(each) for each in arguments)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict or annotation is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {str: "text", bool: "true or false", int: "integer", float: "number", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    if annotation is bool:
        return ("true", "false")
    return tuple(choice for each in get_args(annotation) for choice in _choices(each))


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "none"
    if isinstance(default, tuple):
        default = list(default)
    return str(default).lower() if isinstance(default, bool) else str(default)


def _range(field: FieldInfo) -> str:
    found: dict[str, Any] = {}
    pending: list[Any] = [*field.metadata, field.annotation]
    while pending:
        each = pending.pop()
        found |= {
            name: getattr(each, name) for name in ("ge", "gt", "le", "lt") if getattr(each, name, None) is not None
        }
        pending += [part for part in get_args(each) if not isinstance(part, str)]
        pending += list(getattr(each, "metadata", ()))
    marks = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return ", ".join(f"{words} {found[name]:g}" for name, words in marks.items() if name in found)


def _text(text: str | None) -> str:
    plain = " ".join((text or "").split())
    return re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", plain).replace("``", "`")
