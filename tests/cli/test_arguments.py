"""Options of a command are split from settings of the configuration."""

import argparse

import pytest

from asyncrl.cli.main import split_arguments

parser = argparse.ArgumentParser()
OPTIONS = [
    parser.add_argument("--resume"),
    parser.add_argument("--dry-run", action="store_true"),
]


@pytest.mark.parametrize(
    ("words", "own", "settings"),
    [
        ("f.toml --seed 3", "f.toml", "--seed 3"),
        ("--seed 3 f.toml", "f.toml", "--seed 3"),
        ("--dry-run f.toml --a.b=c", "--dry-run f.toml", "--a.b=c"),
        ("--resume runs/x --steps 3", "--resume runs/x", "--steps 3"),
        ("--resume=runs/x --steps -3", "--resume=runs/x", "--steps -3"),
        ("--a --b 1", "", "--a --b 1"),  # reading the settings reports the missing value
        ("--resume.x 1", "", "--resume.x 1"),
    ],
)
def test_the_split(words, own, settings):
    split = split_arguments(words.split(), OPTIONS)
    assert (split.own, split.settings) == (own.split(), settings.split())


def test_a_misspelt_option_is_not_a_setting():
    with pytest.raises(ValueError, match="did you mean --dry-run"):
        split_arguments(["--dri-run"], OPTIONS)
    with pytest.raises(ValueError, match="did you mean --resume"):
        split_arguments(["--resum", "x"], OPTIONS)
