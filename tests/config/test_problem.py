"""What is said about a value that cannot be used."""

import pytest

from asyncrl.config import Config
from asyncrl.config.problem import _paths, allowed, field_at
from asyncrl.errors import ConfigError

SMALLEST = {"name": "first", "steps": 10, "model": {"source": "scratch"}, "env": {"name": "calculator"}}


def message(**tables):
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({**SMALLEST, **tables})
    return str(caught.value)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"trainer": {"lr": "fast"}}, 'trainer.lr = "fast": must be a number, above 0 and at most 1'),
        ({"trainer": {"lr": float("nan")}}, "trainer.lr = nan: must be a number"),
        ({"steps": 1.5}, "steps = 1.5: must be a whole number"),
        ({"steps": True}, "steps = true: must be a whole number"),
        ({"seed": -1}, "seed = -1: must be a whole number, at least 0"),
        ({"eval": {"on_start": 1}}, "eval.on_start = 1: must be true or false"),
        ({"trainer": 3}, "trainer = 3: must be a table with engine"),
        ({"rollout": {"stop": [""]}}, 'rollout.stop[0] = "": must be a list of texts that are not empty'),
        ({"rollout": {"stop": "x"}}, 'rollout.stop = "x": must be a list of texts'),
        ({"rollout": {"top_p": 0}}, "rollout.top_p = 0: must be a number, above 0 and at most 1"),
        ({"buffer": {"capacity_groups": 0}}, "capacity_groups = 0: must be a whole number, at least 1"),
        ({"name": "a/b"}, 'name = "a/b": must be text, at most 80 characters'),
        ({"runs": ""}, 'runs = "": must be a path'),
        ({"runs": "a\0b"}, 'runs = "a\\u0000b": must be a path'),
        ({"env": {}}, "env.name: is missing; give text"),
        ({"env": {"name": "a b"}}, "and that is an installed name or package.module:Name"),
    ],
)
def test_the_rule_the_value_and_what_is_allowed(tables, text):
    assert text in message(**tables)


def test_every_pattern_is_said_in_words():
    fields = {path: field_at(Config, path.split(".")) for path in _paths(Config)}
    assert [path for path, field in fields.items() if field is None or "that matches" in allowed(field)] == []


@pytest.mark.parametrize(
    ("tables", "suggestion"),
    [
        ({"trainr": {}}, "did you mean trainer?"),
        ({"trainer": {"group_sise": 4}}, "did you mean trainer.group_size?"),
        ({"trainer": {"learning_rate": 4}}, "did you mean trainer.lr?"),
        ({"lr": 0.1}, "did you mean trainer.lr or sft.lr or critic.lr?"),
        ({"trainer": {"temperature": 1}}, "did you mean rollout.temperature?"),
        ({"trainer": {"temprature": 1}}, "did you mean rollout.temperature?"),
        ({"algorithm": {"anchor": "proximall"}}, 'did you mean "proximal"?'),
        ({"model": {"source": "scratch", "dtype": "BFloat16"}}, 'did you mean "bfloat16"?'),
        ({"checkpoint": {"zzz": 1}}, "[checkpoint] has every, keep_last"),
    ],
)
def test_the_nearest_match_is_named(tables, suggestion):
    assert suggestion in message(**tables)


def test_all_problems_of_a_file_are_reported_together():
    text = message(steps=-1, trainer={"lr": 0, "bogus": 1}, eval={"tasks": "many"})
    assert text.startswith("4 problems\n")
    for path in ("steps", "trainer.lr", "trainer.bogus", "eval.tasks"):
        assert f"\n  {path}" in text


def test_hundreds_of_problems_stay_on_one_screen():
    text = message(**{f"unknown_{number}": 1 for number in range(300)})
    assert len(text.splitlines()) < 25
    assert "... and 280 more" in text


def test_a_long_value_is_shortened():
    assert len(message(name="x" * 100_000)) < 400


def test_the_file_is_named():
    with pytest.raises(ConfigError, match=r"^some\.toml: seed = -1"):
        Config.from_mapping({**SMALLEST, "seed": -1}, origin="some.toml")


def test_options_nested_without_end_are_refused():
    options = {}
    for _ in range(1000):
        options = {"a": options}
    assert "nested at most 16 levels" in message(env={"name": "calculator", "options": options})
