"""Settings from the command line."""

import tomllib

import pytest

from asyncrl.config import Config, apply_overrides, load_config, parse_overrides
from asyncrl.errors import ConfigError

FILE = 'name = "first"\nsteps = 10\n[model]\nsource = "scratch"\n[env]\nname = "calculator"\noptions = {digits = 2}\n'


@pytest.fixture
def load(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(FILE)
    return lambda *words: load_config(file, words)


def test_both_spellings_dashes_and_the_last_one_wins(load):
    config = load("--trainer.lr", "1e-4", "--max-staleness=0", "--trainer.groups-per-step", "4", "--trainer.lr=1e-3")
    assert config.trainer.lr == 1e-3
    assert config.max_staleness == 0
    assert config.trainer.groups_per_step == 4


def test_free_form_tables_take_any_key(load):
    config = load("--env.options.digits", "3", "--env.options.max-terms=4", "--env.options.nested.key", "text")
    assert config.env.options == {"digits": 3, "max_terms": 4, "nested": {"key": "text"}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("1e-4", 1e-4),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ('"3"', "3"),
        ("some text", "some text"),
        ("", ""),
        ("3\nseed = 4", "3\nseed = 4"),
        ("9" * 5000, "9" * 5000),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_values_are_toml_literals_or_else_text(text, value):
    overrides = parse_overrides([f"--env.options.x={text}"])
    assert apply_overrides({}, overrides, Config) == {"env": {"options": {"x": value}}}


def test_text_fields_take_text_that_looks_like_a_number(load):
    config = load("--name", "42", "--runs", "7", "--model.source", "none", "--model.path", "2024-01-01")
    assert config.name == "42"
    assert str(config.runs) == "7"
    assert config.model.path == "2024-01-01"


def test_none_takes_an_optional_key_away(load):
    config = load("--buffer.capacity-groups", "64", "--buffer.capacity-groups", "none", "--telemetry.progress", "none")
    assert config.buffer.capacity_groups is None
    assert config.telemetry.progress == "none"


@pytest.mark.parametrize(("table", "key"), [("ledger", "kind"), ("simulation", "saturation")])
def test_none_removes_what_is_set_by_default_also_in_a_file(load, table, key):
    taken = load(f"--{table}.{key}", "none")
    assert getattr(getattr(load(), table), key) is not None
    assert getattr(getattr(taken, table), key) is None
    assert Config.from_mapping(tomllib.loads(taken.to_toml())) == taken


def test_one_word_is_a_list_of_one(load):
    assert load("--telemetry.trackers", "wandb").telemetry.trackers == ("wandb",)
    assert load("--rollout.stop", '["a", "b"]').rollout.stop == ("a", "b")
    assert load("--cluster.colocate", "all").cluster.colocate == ("trainer", "critic", "reference", "rollout")


def test_the_file_is_not_changed_by_overrides():
    data = {"trainer": {"lr": 1.0}}
    apply_overrides(data, parse_overrides(["--trainer.lr", "2"]), Config)
    assert data == {"trainer": {"lr": 1.0}}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["stray"], "'stray' is not a setting"),
        (["--steps"], "--steps needs a value"),
        (["--steps", "--seed"], "--steps needs a value"),
        (["--a..b=1"], "is not a dotted key"),
        (["--" + "a." * 500 + "a=1"], "is not a dotted key"),
        (["--=1"], "is not a setting"),
        (["--env.options.x=\udcff"], "is not a dotted key"),
    ],
)
def test_words_that_are_no_settings(words, text):
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        parse_overrides(words)


def test_everything_can_come_from_the_command_line():
    config = load_config(None, ["--name=x", "--steps=1", "--model.source=scratch", "--env.name=calculator"])
    assert config.name == "x"


def test_a_wrong_override_is_reported_like_a_wrong_file(load):
    with pytest.raises(ConfigError) as caught:
        load("--trainer.lr", "fast")
    assert caught.value.path == "trainer.lr"
