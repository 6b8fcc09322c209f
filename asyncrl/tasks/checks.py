"""What can be known before anything starts: the checks of a dry run, and of every start.

A check is a function of the configuration and of what the run will be made from; it raises :class:`ConfigError`, whose
path is the key. They are made in stages, cheap ones first, and one error has all problems of its stage.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.config import Config, RewardTrainingConfig, TrainingRanksConfig, check_algorithm
from asyncrl.config.config import Document
from asyncrl.datasets.source import check_files
from asyncrl.errors import AsyncRLError, ConfigError, InvalidDataError
from asyncrl.foreign import cause_of
from asyncrl.interfaces import EnvironmentFactory, FiniteHeldOutTasks, Message
from asyncrl.model_folder import check_model, rotary_change
from asyncrl.plugins import Part, check_part, install_command, is_model_source, offered_options, part_text
from asyncrl.rollout.chat import ChatRenderer, load_renderer
from asyncrl.storage import Store, is_url
from asyncrl.telemetry.trackers import check_tracker
from asyncrl.trainer.assembly import (
    Assembly,
    chat_options,
    check_held_out,
    critic_options,
    needs_critic,
    quiet_vendors,
    rollout_spec,
    trainer_options,
    warm_start_options,
)
from asyncrl.trainer.sft import file_conversations
from asyncrl.weights import TransportSpec

_log = logging.getLogger(__name__)


def check_start(
    config: Config, *, loads_model: bool = True, trains: bool = True, stores: bool = False
) -> EnvironmentFactory:
    """Check what a run needs beside its configuration; return its environments, which were made for that. Blocks.

    Nothing is started or loaded, and no weights are read. ``loads_model`` is whether the configured model counts,
    ``trains`` whether the algorithm and the environment's tasks do. With ``stores`` a small file is written to
    ``checkpoint.url`` and removed.

    Raises:
        ConfigError: with every problem.
        StorageError: the store refuses, or cannot be reached.
    """
    quiet_vendors(config.model)
    _run(*(partial(check, config) for check in (_check_paths, _check_resources, _check_runs)))
    if stores and config.checkpoint.url is not None:
        store = Store(config.checkpoint.url, key="checkpoint.url")
        store.write(".check", b"")
        store.remove(".check")
    made: list[Assembly] = []

    def assemble() -> None:
        with _foreign("env.name", config.env.name):
            made.append(Assembly(config, log_folder=config.runs))

    algorithm = [partial(check_algorithm, config)] if trains else []
    _run(*algorithm, assemble, partial(_check_parts, config))
    (assembly,) = made
    checks: list[Callable[[], object]] = [assembly.make_buffer]
    if trains:
        checks.append(partial(_check_tasks, config, assembly.environments))
    if loads_model:
        checks.append(partial(_check_policy, config, assembly.environments))
    _run(*checks)
    _run(partial(_check_trainers, config, trains=trains))  # the import of FSDP takes longer than all else
    return assembly.environments


def check_reward_training(config: RewardTrainingConfig) -> None:
    """Check what ``asyncrl train-reward-model`` needs, as :func:`check_start`."""

    def parts() -> None:
        check_part(
            "asyncrl.value_engines",
            config.trainer.engine,
            "",
            options=config.trainer.options,
            path="trainer.engine",
            **_ranks_of(config.trainer),
        )
        for name in config.telemetry.trackers:
            check_tracker(name)

    def model() -> None:
        if config.model.path is not None:
            _check_mesh(check_model(config.model.path, key="model.path"), own_head=True, trainer=config.trainer)
        else:  # the answers are its demonstrations
            _check_source(config, lambda index: [])

    quiet_vendors(config.model)
    files = partial(check_files, config.preferences.files, key="preferences.files")
    _run(parts, files, partial(_check_runs, config), model)


def _run(*checks: Callable[[], object]) -> None:
    problems: dict[str, ConfigError] = {}
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.setdefault(str(error), error)
    errors = list(problems.values())
    if len(errors) > 1:
        lines = [
            text if each.path in text else f"{each.path}: {text}; {each.remedy}" for text, each in problems.items()
        ]
        text = "\n  ".join([f"{len(errors)} problems", *lines])
        raise ConfigError(text, path=errors[0].path, remedy=errors[0].remedy)
    if errors:
        raise errors[0]


def _refuse(key: str, what: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{key}{what}; {remedy}", path=key, remedy=remedy)


# ---------------------------------------------------------------------------------------------------------- the checks


def _check_paths(config: Config) -> None:
    """Check that the files and the interpreter exist that the configuration names."""
    if config.sft.data is not None:
        check_files(config.sft.data, key="sft.data")
    template = config.model.chat_template
    if template is not None and not template.is_file():
        _refuse("model.chat_template", f" = {str(template)!r}: no such file", "name a file with a Jinja template")
    python = config.rollout.python
    if python is not None and not os.access(python, os.X_OK):
        what = "cannot be executed" if python.exists() else "no such file"
        remedy = "name the interpreter that `asyncrl engine install` has made"
        _refuse("rollout.python", f" = {str(python)!r}: {what}", remedy)


def _check_parts(config: Config) -> None:
    """Check the parts whose import is cheap, and what they are made from."""
    weights, reward, ledger = config.weights, config.reward, config.ledger
    transport = TransportSpec(name=weights.transport, namespace="", options=dict(weights.options))
    spec = rollout_spec(config, transport, None)
    given: dict[str, Any] = {"weight_version": 0, **spec.engine_given}
    engine, model = "asyncrl.rollout_engines", config.model.path or ""
    check_part(engine, spec.engine, model, options=spec.engine_options, path="rollout.engine", **given)
    given = {"namespace": "", **transport.offered({"rank": 0, "ranks": 1})}
    check_part("asyncrl.weight_transports", transport.name, options=weights.options, path="weights.transport", **given)
    if reward.source != "environment":
        group, path = "asyncrl.reward_models", "reward.source"
        offered = offered_options(group, reward.source, {"tokenizer": model}, path=path)
        check_part(group, reward.source, options=offered | reward.options, path=path)
    if ledger.kind is not None:
        given = {"resume": None, "fsync": ledger.fsync, "commit_latency_s": ledger.commit_latency_s}
        check_part("asyncrl.ledgers", ledger.kind, Path(), options={}, path="ledger.kind", **given)
    for name in config.telemetry.trackers:
        check_tracker(name)
    if config.trainer.lora is not None and find_spec("peft") is None:
        _refuse("trainer.lora", " needs the package peft", f"install it: {install_command('peft')}")


def _check_trainers(config: Config, *, trains: bool) -> None:
    trainer, critic, group = config.trainer, config.critic, {"rank": 0, "master_addr": "", "master_port": None}
    made = [trainer_options(config)] if trains and config.steps else []
    if config.sft.steps or not made:  # which options are taken is checked of a run that makes no engine, too
        made.append({**warm_start_options(config), **({} if config.sft.steps else {"lr_scheduler_type": "constant"})})
    for options in made:
        given = {**options, **group, **_ranks_of(trainer)}
        try:
            check_part(
                "asyncrl.training_engines", trainer.engine, "", options=trainer.options, path="trainer.engine", **given
            )
        except ConfigError as error:
            key = error.path.removeprefix("trainer.")
            if "temperature" in options or key not in type(config.sft).model_fields:
                raise
            text = str(error).replace(error.path, f"sft.{key}", 1)
            raise ConfigError(text, path=f"sft.{key}", remedy=error.remedy) from error
    if needs_critic(config):
        given = {**critic_options(config), **group, **_ranks_of(critic)}
        check_part("asyncrl.value_engines", critic.engine, "", options=critic.options, path="critic.engine", **given)
        if critic.path is not None and not is_model_source(critic.path):
            settings = check_model(critic.path, key="critic.path")
            _check_mesh(settings, own_head=True, critic=critic)


def _ranks_of(ranks: TrainingRanksConfig) -> dict[str, Any]:
    mesh = ranks.mesh_shape()
    return {"world_size": ranks.world_size, **({} if mesh is None else {"mesh": mesh})}


def _check_mesh(settings: Any, *, own_head: bool = False, **roles: TrainingRanksConfig) -> None:
    """Check that the model with these settings of transformers (Any: a vendor's) can be divided over the meshes.

    That of an engine for values gets a head of its own.
    """
    for name, role in roles.items():
        if (mesh := role.mesh_shape()) is not None:
            mesh.check_model(settings, path=f"{name}.mesh", own_head=own_head)


def _check_resources(config: Config) -> None:
    """Check that a group of ranks has a core each, and that the GPUs exist, where the run starts its own cluster."""
    cluster, cores = config.cluster, os.cpu_count() or 1
    if cluster.address is not None:
        _check_devices(config)
        return
    roles = {"trainer": config.trainer, **({"critic": config.critic} if needs_critic(config) else {})}
    counts = {f"{name}.world_size": (role.world_size, role.num_cpus) for name, role in roles.items()}
    counts["rollout.replicas"] = (config.rollout.replicas, config.rollout.num_cpus)
    for key, (count, num_cpus) in counts.items():
        if cluster.backend == "ray" and cluster.num_cpus is None and count > 1 and count * num_cpus > 4 * cores:
            remedy = "use fewer, join a cluster (cluster.address), or set cluster.num_cpus to run them all the same"
            _refuse(
                key, f" = {count}: with {num_cpus:g} CPUs each they need more than 4 times the {cores} here", remedy
            )
    for name in ("trainer", "rollout", "critic", "reward"):
        table = getattr(config, name)
        device = str(table.options.get("device", ""))
        if table.num_gpus or device.startswith("cuda"):
            import torch

            if not torch.cuda.device_count():
                option, value = ("num_gpus", table.num_gpus) if table.num_gpus else ("options.device", device)
                remedy = "leave it out, or join a cluster that has some (cluster.address)"
                _refuse(f"{name}.{option}", f" = {value!r}: this machine has no GPU that torch can use", remedy)
    _check_devices(config)


def _check_devices(config: Config) -> None:
    """Check that workers on Ray reserve the devices that they are to use: others see none."""
    roles: dict[str, Any] = {"trainer": config.trainer, "rollout": config.rollout}  # Any: their tables have both keys
    roles |= {"critic": config.critic} if needs_critic(config) else {}
    roles |= {"reward": config.reward} if config.reward.source != "environment" else {}
    for name, table in roles.items():
        device, shared = str(table.options.get("device", "")), config.cluster.colocate
        together = [roles[each].num_gpus for each in shared if each in roles] if name in shared else [table.num_gpus]
        if config.cluster.backend == "ray" and device.startswith("cuda") and not any(together):
            what = f" = {device!r}: a run on Ray shows no GPU to workers that reserve none"
            _refuse(f"{name}.options.device", what, f"set {name}.num_gpus")


def _check_runs(config: Document) -> None:
    """Check that the folder of the run can be made."""
    try:
        nearest = next(each for each in (config.runs.absolute(), *config.runs.absolute().parents) if each.exists())
        what = "" if nearest.is_dir() else f"{nearest} is no folder"
        if not what and not os.access(nearest, os.W_OK | os.X_OK):
            what = f"{nearest} may not be written to"
    except OSError as error:  # a name too long, a folder that may not be entered
        what = str(error.strerror)
    if what:
        _refuse("runs", f" = {str(config.runs)!r}: {what}", "name another folder")


def _check_policy(config: Config, environments: EnvironmentFactory) -> None:
    """Check the model, its chat template, and that it has a position for every token of a trajectory."""
    model, longest = config.model, config.rollout.max_seq_len
    if model.path is None:
        with _foreign("env.name", config.env.name):  # whose demonstrations it may need
            given = getattr(environments, "demonstration", None)
            positions = _check_source(config, partial(_conversation, given) if given is not None else None)
    else:
        settings = check_model(model.path, key="model.path")
        positions = getattr(settings.get_text_config(), "max_position_embeddings", None)
        if (change := rotary_change(settings)) is not None and longest > change.tokens:
            what = (
                f" = {longest}: rotary positions ({change.kind}) are others in rows of more than {change.tokens} tokens"
            )
            _refuse("rollout.max_seq_len", what, f"use at most {change.tokens}, or another model")
        _check_mesh(settings, trainer=config.trainer)
        if needs_critic(config) and config.critic.path is None:
            _check_mesh(settings, own_head=True, critic=config.critic)
        if is_url(model.path) or Path(model.path).is_dir():
            renderer = load_renderer(model.path, **chat_options(config))
            _check_tools(renderer, environments, model.chat_template or model.path)
    positions = config.rollout.options.get("max_model_tokens", positions)
    if isinstance(positions, int) and longest > positions:
        what = f" = {longest}: the model has {positions} positions"
        _refuse("rollout.max_seq_len", what, f"use at most {positions}, or another model")


def _check_tools(renderer: ChatRenderer, environments: EnvironmentFactory, where: Path | str) -> None:
    """Warn of a chat template that does not fit the environment's tools, where these are known before an episode."""
    tools: object = ()
    with suppress(Exception):  # foreign code may raise anything, and other checks name it
        tools = getattr(environments.make(), "tools", ())
    if tools and not renderer.declares_tools():
        text = "the chat template of %s declares no tools: name them, and how a call is written, in the system message"
        _log.warning(text + " (docs/environments.md#tools)", where)
    elif tools and not renderer.reads_calls():
        text = "the chat template of %s writes tool calls in another notation than %s, in which they are read: see "
        _log.warning(text + "model.tool_call_parser (docs/environments.md#tools)", where, renderer.notation.name)


def _check_source(config: Document, demonstrations: object) -> int | None:
    """Check the source of a model that is made for the run; return the positions that it will have, where known."""
    model = config.model
    assert model.source is not None
    given: dict[str, Any] = {"seed": config.seed, "demonstrations": demonstrations}
    source = check_part(
        "asyncrl.model_sources", model.source, Path(), options=model.options, path="model.source", **given
    )
    parameter = signature(source).parameters.get("max_position")
    return model.options.get("max_position", parameter.default if parameter is not None else None)


def _check_tasks(config: Config, environments: EnvironmentFactory) -> None:
    """Make the first tasks that are used, and an environment; check the conversations of the warm start."""
    lacks = [name for name in ("task", "make") if not callable(getattr(environments, name, None))]
    if lacks:
        remedy = "write a class with the methods of asyncrl.interfaces.EnvironmentFactory"
        _refuse("env.name", f" = {part_text(config.env.name)!r} has no {' and no '.join(lacks)}", remedy)
    with _foreign("env.name", config.env.name):
        if config.steps:
            environments.task(0, split="train")
        if config.eval.tasks:
            check_held_out(config, environments)
            if not isinstance(environments, FiniteHeldOutTasks):
                environments.task(0, split="held_out")
        made = environments.make()
    command_s = getattr(environments, "longest_command_s", 0.0)
    if command_s >= config.env.deadline_s:
        what = f" = {config.env.deadline_s:g}: one command of a turn may take {command_s:g} s"
        _refuse("env.deadline_s", what, "use several times env.options.limits.deadline_s")
    credit = getattr(made, "credit", config.algorithm.credit)
    if config.steps and config.algorithm.credit != credit:
        remedy = f'set algorithm.credit = "{credit}", or train one player only'
        _refuse("algorithm.credit", f' must be "{credit}": each player of an episode has its own reward', remedy)
    if config.steps and hasattr(made, "credit") and config.reward.source != "environment":
        what = f" = {config.reward.source!r} gives one reward to all players of an episode"
        _refuse("reward.source", what, 'use "environment"')
    methods = ("close",) if hasattr(made, "run_agent") else ("reset", "step", "close")
    if lacks := [name for name in methods if not callable(getattr(made, name, None))]:
        remedy = "see asyncrl.interfaces.Environment"
        _refuse("env.name", f": the {type(made).__name__} that make() returned has no {' and no '.join(lacks)}", remedy)
    if config.sft.steps:
        with _foreign("sft.data" if config.sft.data is not None else "env.name", config.env.name):
            if config.sft.data is not None:
                file_conversations(config.sft.data, seed=config.seed)
            else:
                _conversation(environments.demonstration, 0)


def _conversation(demonstration: Callable[[int], list[Message]], index: int) -> list[Message]:
    """Return the messages of a demonstration, which may come from foreign code."""
    found: object = demonstration(index)
    if isinstance(found, list) and found and all(isinstance(each, dict) and "role" in each for each in found):
        return found
    what = f": demonstration({index}) must return a conversation, a list of messages; it returned {repr(found)[:80]}"
    _refuse("env.name", what, 'messages are like {"role": "user", "content": "2 + 3 = ?"}')


@contextmanager
def _foreign(key: str, name: Part) -> Iterator[None]:
    """Turn what foreign code raises, or rows of data that cannot be read, into a ConfigError of the key."""
    try:
        yield
    except InvalidDataError as error:
        remedy = 'correct the data, or name its columns, as in columns = {prompt = "question"} of env.options'
        _refuse("env.options" if key == "env.name" else key, f": {error}", remedy)  # the error names the files
    except AsyncRLError:
        raise
    except Exception as error:  # noqa: BLE001  foreign code may raise anything
        _refuse(key, f" = {part_text(name)!r} failed: {cause_of(error)}: {error}", "correct the environment")
