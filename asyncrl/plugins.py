"""Load parts by name: packaging entry points, or a dotted path ``package.module:Name``. Or take the part itself.

A package adds a part by declaring it in its own metadata, without any change of asyncrl:

    [project.entry-points."asyncrl.rollout_engines"]
    mine = "my_package.engine:MyEngine"

Where a name is expected, a program may give the class, function or callable instance (:data:`Part`).
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, entry_points, requires
from importlib.util import find_spec
from inspect import Signature, signature
from typing import Any, TypeAlias

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.foreign import cause_of

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
    "asyncrl.sandboxes": "sandbox backend",
    "asyncrl.model_sources": "model source",
    "asyncrl.trackers": "tracker",
    "asyncrl.advantages": "advantage",
    "asyncrl.policy_losses": "policy loss",
    "asyncrl.corrections": "correction",
    "asyncrl.commands": "command",
    "asyncrl.doctor_checks": "check",
}
"""Entry-point groups that asyncrl reads, each with the noun for one of its parts."""


Part: TypeAlias = str | Callable[..., Any]
"""A part: an installed name, a dotted path, or the class, function or callable instance itself."""


def part_text(part: Part) -> str:
    """Return the name of a part; of a class or function its dotted path, which :func:`is_importable` may load again.

    The text of an instance cannot be loaded, as its state is not in it.

    >>> part_text("grpo"), part_text(part_names), part_text(Signature())
    ('grpo', 'asyncrl.plugins:part_names', 'inspect:Signature.<instance>')
    """
    if isinstance(part, str):
        return part
    if not hasattr(part, "__qualname__"):
        return f"{part_text(type(part))}.<instance>"
    return f"{part.__module__}:{part.__qualname__}"


def is_importable(part: Part) -> bool:
    """Return whether another process can import the part: it is a name, or an object of a module."""
    if isinstance(part, str):
        return True
    module, _, attributes = part_text(part).partition(":")
    found: Any = sys.modules.get(module) if module != "__main__" else None
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    return found is part


def part_names(group: str) -> tuple[str, ...]:
    """Return the names installed in ``group``, sorted. Imports none of them."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def part_path(group: str, name: Part, *, path: str = "") -> str:
    """Return the dotted path of ``name``, for a process without this one's entry points. Imports nothing.

    Raises:
        ConfigError: unknown name, or an object that no other process can import; ``path`` is the dotted key of the
            configuration that named it.
    """
    if not is_importable(name):
        text = f"another process cannot import the {_noun(group)} {part_text(name)!r}"
        raise _error(path, text, "put it into a module of its own")
    name = part_text(name)
    if ":" in name:
        return name
    found = sorted({entry.value for entry in entry_points(group=group) if entry.name == name})
    if len(found) == 1:
        return found[0]
    if found:
        remedy = f"write one of them out: {' or '.join(found)}"
        raise _error(path, f"two packages have a {_noun(group)} {name!r}", remedy)
    names = part_names(group)
    remedy = f"{_suggestion(name, names)}Installed: {', '.join(names) or 'none'}; others as package.module:Name"
    raise _error(path, f"no {_noun(group)} named {name!r}", remedy)


def load_part(group: str, name: Part, *, path: str = "") -> Any:
    """Import the object of this name: a class, function or module of the contract that ``group`` stands for.

    An object is returned as it is.

    Args:
        group: one of :data:`PART_GROUPS`, or a group of another package.
        name: an installed name, or ``package.module:Name`` for a part that is not packaged.
        path: dotted key of the configuration that named it, for messages.

    Raises:
        ConfigError: unknown name (with the installed ones and the nearest), or it cannot be imported (with the cause
            and the command that installs what is missing).
    """
    if not isinstance(name, str):
        return name
    module_name, _, attributes = part_path(group, name, path=path).partition(":")
    what = f"{_noun(group)} {name!r}"
    if module_name.endswith(".py"):
        remedy = f"write {module_name.removesuffix('.py')}:{attributes}, and run in the file's folder"
        raise _error(path, f"{what} names a file where a module is meant", remedy)
    if not module_name.strip(".") or module_name.startswith("."):
        raise _error(path, f"{what} is no dotted path", "write package.module:Name")
    try:
        part: Any = importlib.import_module(module_name)
    except ImportError as error:
        text = f"{what} cannot be imported from {module_name}: {error}"
        raise _error(path, text, _import_remedy(error, module_name)) from error
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        text = f"{what} cannot be imported from {module_name}: {cause_of(error)}: {error}"
        raise _error(path, text, "correct the module") from error
    for attribute in attributes.split(".") if attributes else ():
        try:
            part = getattr(part, attribute)
        except AttributeError as error:
            near = get_close_matches(attribute, [known for known in dir(part) if not known.startswith("_")], n=1)
            remedy = f"did you mean {near[0]}?" if near else "check the name behind the colon"
            if module_name == "__main__" or attribute.startswith("<"):
                remedy = "a program gave the object itself: give it again, in Python"
            raise _error(path, f"{what}: {module_name} has no {attribute!r}", remedy) from error
    return part


def make_part(
    group: str,
    name: Part,
    /,
    *arguments: Any,
    options: Mapping[str, Any],
    path: str,
    table: str | None = None,
    **given: Any,
) -> Any:
    """Make a part: ``part(*arguments, **given, **options)``, with ``group`` and ``name`` as in :func:`load_part`.

    ``options`` come from the user, ``given`` from the run itself. ``path`` is the dotted key that named the part
    (``env.name``); its options are beside it (``env.options``), or under the dotted key ``table``.

    Raises:
        ConfigError: as :func:`load_part`; or an option is unknown, missing, set by the run, or has a value that the
            part rejects.
    """
    table = table or _table(path)
    part, allowed = _accepting(group, name, *arguments, options=options, path=path, table=table, **given)
    try:
        return part(*arguments, **given, **options)
    except AsyncRLError:
        raise
    except (TypeError, ValueError) as error:
        remedy = f"options it takes: {', '.join(allowed) or 'none'}"
        raise _error(
            table, f"{_noun(group)} {part_text(name)!r} cannot be made from its options: {error}", remedy
        ) from error


def check_part(
    group: str,
    name: Part,
    /,
    *arguments: Any,
    options: Mapping[str, Any],
    path: str,
    table: str | None = None,
    **given: Any,
) -> Any:
    """Return a part after checking what can be known before it is made; arguments and errors are those of `make_part`.

    A part may name a ``package`` that it imports when it is made, and have a ``check_options`` that takes the same
    arguments and raises ConfigError, with the option as its path.
    """
    table = table or _table(path)
    part, _ = _accepting(group, name, *arguments, options=options, path=path, table=table, **given)
    check_package(part, path=path, what=f"{_noun(group)} {part_text(name)!r}")
    if (check := getattr(part, "check_options", None)) is not None:
        try:
            check(*arguments, **given, **options)
        except ConfigError as error:
            if not error.path or error.path.startswith(f"{table.partition('.')[0]}."):
                raise
            section, _, _ = table.rpartition(".")  # whose own keys are given, beside the options in its table
            where = section if section and error.path.partition(".")[0] in given else table
            raise _error(f"{where}.{error.path}", str(error), error.remedy) from error
    return part


def needs_argument(part: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a function, or an instance, has a positional parameter without a default beside ``options``."""
    if isinstance(part, type) or not callable(part):
        return False
    found = signature(part).parameters.values()
    positional = [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return any(each.default is each.empty and each.name not in options for each in positional)


def check_package(part: Any, *, path: str, what: str) -> None:
    """Raise ConfigError unless the package that a part names as its ``package`` is installed."""
    package = getattr(part, "package", "")
    try:
        found = not package or find_spec(package) is not None
    except ValueError:  # a module that was put in place of it, or barred
        found = False
    if not found:
        remedy = getattr(part, "package_remedy", "") or f"install it: {install_command(package)}"
        raise _error(path, f"{what} needs the package {package}, which is not installed", remedy)


def _accepting(
    group: str, name: Part, /, *arguments: Any, options: Mapping[str, Any], path: str, table: str, **given: Any
) -> tuple[Any, list[str]]:
    """Return a part whose signature accepts these arguments, and the names of the options that it takes."""
    part, shown = load_part(group, name, path=path), part_text(name)
    found = _signature(part, f"{_noun(group)} {shown!r}", path=path)
    parameters = found.parameters.values()
    named = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    allowed = [each for each in named[len(arguments) :] if each not in given]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        for option in options:
            if option not in allowed:
                remedy = f"{_suggestion(option, allowed)}allowed: {', '.join(allowed) or 'none'}"
                raise _error(f"{table}.{option}", f"{_noun(group)} {shown!r} has no option {option!r}", remedy)
    try:
        found.bind(*arguments, **given, **options)
    except TypeError as error:
        remedy = f"options it takes: {', '.join(allowed) or 'none'}"
        raise _error(table, f"{_noun(group)} {shown!r} cannot be made from its options: {error}", remedy) from error
    return part, allowed


def _signature(part: Any, what: str, *, path: str) -> Signature:
    try:
        return signature(part)
    except (TypeError, ValueError) as error:
        raise _error(path, f"{what} is a {type(part).__name__}", "name a class or a function") from error


def is_model_source(model: str) -> bool:
    """Return whether ``model`` is ``SOURCE:NAME`` of an installed model source, which has to make its folder."""
    source, colon, _ = model.partition(":")
    return bool(colon) and source in part_names("asyncrl.model_sources")


def offered_options(group: str, name: Part, offered: Mapping[str, Any], *, path: str = "") -> dict[str, Any]:
    """Return those of the ``offered`` keyword arguments that the part declares as parameters.

    A part receives what the run has (a seed, the policy's tokenizer) by naming it, as with pytest's fixtures. A class
    that takes ``**options`` declares those of the class that it extends, too.

    Raises:
        ConfigError: as :func:`load_part`.
    """
    part = load_part(group, name, path=path)
    parameters = _signature(part, f"{_noun(group)} {name!r}", path=path).parameters
    declared = {*parameters}
    bases: tuple[Any, ...] = part.__mro__[1:] if isinstance(part, type) else ()
    for base in bases:
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            break
        parameters = signature(base.__init__).parameters
        declared |= {*parameters}
    return {key: value for key, value in offered.items() if key in declared}


def _table(path: str) -> str:
    return f"{path.rpartition('.')[0]}.options"


def _noun(group: str) -> str:
    return PART_GROUPS.get(group, f"part of {group}")


def _suggestion(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _error(path: str, text: str, remedy: str) -> ConfigError:
    return ConfigError(f"{path}: {text}; {remedy}" if path else f"{text}; {remedy}", path=path, remedy=remedy)


def _import_remedy(error: ImportError, module_name: str) -> str:
    missing = error.name or ""
    if not isinstance(error, ModuleNotFoundError) or not missing:
        return f"see the cause with: {sys.executable} -c 'import {module_name}'"
    package = missing.partition(".")[0]
    if package != module_name.partition(".")[0]:
        return f"install it: {install_command(package)}"
    if package == missing:
        return f"no package {package!r} on the path: install it, or run in its folder"
    return "check the module's name"


def install_command(package: str) -> str:
    """Return the pip command that installs ``package``, in the range that asyncrl's metadata requires."""
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
