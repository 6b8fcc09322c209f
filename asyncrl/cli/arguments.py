"""Telling a command's own options from settings of the configuration: both are written ``--name value``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

__all__ = ["SplitArguments", "split_arguments"]


@dataclass(frozen=True, slots=True)
class SplitArguments:
    """``own`` goes to argparse, ``settings`` to :func:`asyncrl.config.load_config`."""

    own: list[str]
    settings: list[str]


def split_arguments(arguments: Sequence[str], options: Iterable[argparse.Action]) -> SplitArguments:
    """Split what follows the command's name.

    Every ``--name`` that is not one of ``options`` is a setting, with ``=value`` or the word behind it as its value:
    argparse itself would take that word for the file.

    Raises:
        ValueError: a word without a value that looks like a misspelt option.
    """
    takes_value = {name: action.nargs != 0 for action in options for name in action.option_strings}
    own: list[str] = []
    settings: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name in takes_value:
            own.append(word)
            if takes_value[name] and not equals and words:
                own.append(words.pop(0))
        elif word.startswith("--") and len(word) > 2:
            has_value = bool(equals) or (bool(words) and not words[0].startswith("--"))
            near = get_close_matches(name, takes_value, n=1, cutoff=0.75)
            if near and "." not in name and (not has_value or takes_value[near[0]]):
                raise ValueError(f"unknown option {name}; did you mean {near[0]}?")
            settings.append(word)
            if not equals and has_value:
                settings.append(words.pop(0))
        else:
            own.append(word)
    return SplitArguments(own, settings)
