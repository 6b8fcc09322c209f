"""Names become parts here, and only here: packaging entry points, or a dotted path ``package.module:Name``.

A package brings a part by declaring it in its own metadata; nothing of asyncrl has to be changed:

    [project.entry-points."asyncrl.rollout_engines"]
    mine = "my_package.engine:MyEngine"
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires
from inspect import signature
from typing import Any

from asyncrl.errors import AsyncRLError, ConfigError

__all__ = ["PART_GROUPS", "check_part", "install_command", "load_part", "make_part", "part_names", "part_path"]

PART_GROUPS = {
    "asyncrl.rollout_engines": "rollout engine",
    "asyncrl.engine_recipes": "engine recipe",
    "asyncrl.training_engines": "training engine",
    "asyncrl.value_engines": "value engine",
    "asyncrl.weight_transports": "weight transport",
    "asyncrl.replay_buffers": "replay buffer",
    "asyncrl.ledgers": "ledger",
    "asyncrl.reward_models": "reward model",
    "asyncrl.environments": "environment",
    "asyncrl.reward_rules": "reward rule",
    "asyncrl.model_sources": "model source",
    "asyncrl.trackers": "tracker",
    "asyncrl.advantages": "advantage",
    "asyncrl.policy_losses": "policy loss",
    "asyncrl.corrections": "correction",
}
"""Entry-point groups that asyncrl reads, and what one of them is called."""


def part_names(group: str) -> tuple[str, ...]:
    """Names installed in ``group``, sorted. Imports none of them."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def check_part(group: str, name: str, *, path: str = "") -> None:
    """Check that ``name`` is installed or is a dotted path, without importing it.

    Raises:
        ConfigError: unknown; ``path`` is the dotted key of the configuration that asked for it.
    """
    if ":" not in name:
        _entry_point(group, name, path=path)


def part_path(group: str, name: str, *, path: str = "") -> str:
    """The dotted path behind ``name``, for a process that does not know this one's entry points. Imports nothing.

    Raises:
        ConfigError: as :func:`check_part`.
    """
    return name if ":" in name else _entry_point(group, name, path=path).value


def load_part(group: str, name: str, *, path: str = "") -> Any:
    """The object behind ``name``: a class or function of the contract that ``group`` stands for.

    Args:
        group: one of :data:`PART_GROUPS`, or another package's group of its own.
        name: an installed name, or ``package.module:Name`` for a part that is not packaged.
        path: dotted key of the configuration that asked for it, for messages.

    Raises:
        ConfigError: unknown name (with the installed ones and the nearest), or it cannot be imported (with the cause
            and the way to install what is missing).
    """
    value = name if ":" in name else _entry_point(group, name, path=path).value
    module_name, _, attributes = value.partition(":")
    what = f"{_noun(group)} {name!r}"
    try:
        part: Any = importlib.import_module(module_name)
    except ImportError as error:
        remedy = _import_remedy(error, module_name)
        raise ConfigError(
            _message(path, f"{what} cannot be imported from {module_name}: {error}", remedy), path=path, remedy=remedy
        ) from error
    except (ValueError, TypeError) as error:
        if module_name.strip(".") and not module_name.startswith("."):
            raise  # the module's own mistake, raised while it was imported
        remedy = "write package.module:Name"
        raise ConfigError(_message(path, f"{what} is no dotted path", remedy), path=path, remedy=remedy) from error
    for attribute in attributes.split("."):
        try:
            part = getattr(part, attribute)
        except AttributeError as error:
            near = get_close_matches(attribute, [known for known in dir(part) if not known.startswith("_")], n=1)
            remedy = f"did you mean {near[0]}?" if near else "check the name behind the colon"
            raise ConfigError(
                _message(path, f"{what}: {module_name} has no {attribute!r}", remedy), path=path, remedy=remedy
            ) from error
    return part


def make_part(
    group: str,
    name: str,
    *arguments: Any,
    options: Mapping[str, Any],
    path: str,
    table: str | None = None,
    **given: Any,
) -> Any:
    """Make a part: ``part(*arguments, **given, **options)``.

    Args:
        group: as in :func:`load_part`.
        name: likewise.
        arguments: positional arguments of the part.
        options: keyword arguments that a user wrote.
        path: dotted key that named the part (``env.name``); its options stand beside it (``env.options``).
        table: dotted key of the options, where they stand elsewhere.
        given: keyword arguments that the run itself decides.

    Raises:
        ConfigError: as :func:`load_part`; or an option is unknown, missing, not the user's to set, or has a value that
            the part does not take.
    """
    part = load_part(group, name, path=path)
    table = table or f"{path.rpartition('.')[0]}.options"
    parameters = signature(part).parameters.values()
    named = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    allowed = [each for each in named[len(arguments) :] if each not in given]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        for option in options:
            if option not in allowed:
                near = get_close_matches(option, allowed, n=1)
                remedy = f"did you mean {near[0]!r}? " if near else ""
                remedy += f"allowed: {', '.join(allowed) or 'none'}"
                what = f"{_noun(group)} {name!r} has no option {option!r}"
                raise ConfigError(_message(f"{table}.{option}", what, remedy), path=f"{table}.{option}", remedy=remedy)
    try:
        return part(*arguments, **given, **options)
    except AsyncRLError:
        raise
    except (TypeError, ValueError) as error:
        remedy = f"options it takes: {', '.join(allowed) or 'none'}"
        what = f"{_noun(group)} {name!r} cannot be made from its options: {error}"
        raise ConfigError(_message(table, what, remedy), path=table, remedy=remedy) from error


def _entry_point(group: str, name: str, *, path: str) -> EntryPoint:
    found = {entry.value: entry for entry in entry_points(group=group) if entry.name == name}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        remedy = f"write one of them out: {' or '.join(sorted(found))}"
        raise ConfigError(
            _message(path, f"two packages bring a {_noun(group)} {name!r}", remedy), path=path, remedy=remedy
        )
    names = part_names(group)
    near = get_close_matches(name, names, n=1)
    remedy = f"did you mean {near[0]!r}? " if near else ""
    remedy += f"Installed: {', '.join(names) or 'none'}; others as package.module:Name"
    raise ConfigError(_message(path, f"no {_noun(group)} named {name!r}", remedy), path=path, remedy=remedy)


def _noun(group: str) -> str:
    return PART_GROUPS.get(group, f"part of {group}")


def _message(path: str, text: str, remedy: str) -> str:
    return f"{path}: {text}; {remedy}" if path else f"{text}; {remedy}"


def _import_remedy(error: ImportError, module_name: str) -> str:
    missing = error.name or ""
    if not isinstance(error, ModuleNotFoundError) or not missing:
        return f"see the cause with: {sys.executable} -c 'import {module_name}'"
    package = missing.partition(".")[0]
    if package != module_name.partition(".")[0]:
        return f"install it: {install_command(package)}"
    if package == missing:
        return f"no package {package!r} on the path: install it, or run where it lies"
    return "check the module's name"


def install_command(package: str) -> str:
    """The pip command that brings ``package``, in the range that asyncrl's metadata names."""
    try:
        requirements = requires("asyncrl") or []
    except PackageNotFoundError:  # asyncrl itself is on the path but not installed
        requirements = []
    for requirement in requirements:
        name = re.match(r"[\w.\-]+", requirement)
        if name is not None and _normal(name[0]) == _normal(package):
            package = re.sub(r"[\s()]", "", requirement.partition(";")[0])
            break
    return f"{sys.executable} -m pip install '{package}'"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
