"""The sections together: defaults, derived values, and values that do not fit."""

import pickle
import traceback

import pytest
from pydantic import ValidationError

from asyncrl.config import Config
from asyncrl.errors import ConfigError

SMALLEST = {"name": "first", "steps": 10, "model": {"source": "scratch"}, "env": {"name": "calculator"}}


def config(**tables):
    merged = {**SMALLEST}
    for name, value in tables.items():
        merged[name] = {**SMALLEST.get(name, {}), **value} if isinstance(value, dict) else value
    return Config.from_mapping(merged)


def problem(**tables):
    with pytest.raises(ConfigError) as caught:
        config(**tables)
    return caught.value


def test_the_smallest_configuration_is_complete():
    smallest = config()
    assert smallest.max_staleness == 1
    assert smallest.reward.source == "environment"


def test_the_buffer_holds_what_may_still_be_trained_on():
    assert config(max_staleness=0, trainer={"groups_per_step": 4}).capacity_groups == 4
    assert config(max_staleness=3, trainer={"groups_per_step": 4}).capacity_groups == 32  # overdue ones too
    waiting = config(max_staleness=3, trainer={"groups_per_step": 4}, staleness={"policy": "wait"})
    assert waiting.capacity_groups == 16
    assert config(buffer={"capacity_groups": 100}).capacity_groups == 100


def test_it_cannot_be_changed():
    with pytest.raises(ValidationError):
        config().trainer.lr = 1.0


def test_two_configurations_share_no_options():
    first, second = config(), config()
    first.rollout.options["max_batch"] = 3
    assert second.rollout.options == {}


def test_a_resolved_configuration_reads_back_as_itself(tmp_path):
    from asyncrl.config import load_config

    original = config(
        model={"source": "scratch", "options": {"layers": 2, "deep": {"er": [1, {"x": 0.5}]}}},
        rollout={"stop": ["\n", 'quote " and \\']},
        env={"name": "my.module:Factory", "options": {"odd key": "ümlaut"}},
    )
    file = tmp_path / "config.toml"
    file.write_text(original.to_toml())
    assert load_config(file) == original


def test_derived_values_are_written_as_comments():
    assert "# capacity_groups = 64, derived" in config().to_toml()
    assert "# capacity" not in config(buffer={"capacity_groups": 40}).to_toml()


@pytest.mark.parametrize(
    ("tables", "path", "words"),
    [
        ({"model": {"path": "/some/where"}}, "model.source", "exclude each other"),
        ({"model": {"source": None}}, "model", "needs one of path and source"),
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature", "greedy"),
        ({"rollout": {"temperature": 1e-6}}, "rollout.temperature", "at least 0.0001"),
        ({"trainer": {"num_mini_batches": 3}}, "trainer.num_mini_batches", "does not divide groups_per_step = 16"),
        ({"rollout": {"max_new_tokens": 1024}}, "rollout.max_new_tokens", "max_seq_len = 1024"),
        ({"trainer": {"max_tokens_per_microbatch": 1023}}, "trainer.max_tokens_per_microbatch", "at least 1024"),
        ({"buffer": {"capacity_groups": 15}}, "buffer.capacity_groups", "wait for ever"),
        ({"reward": {"options": {"a": 1}}}, "reward.options", "take no options"),
        ({"eval": {"every": 1, "replicas": 2}, "rollout": {"replicas": 2}}, "eval.replicas", "leave none"),
        ({"trainer": {"warmup_steps": 11}}, "trainer.warmup_steps", "in 10 optimizer steps"),
        ({"sft": {"steps": 5, "warmup_steps": 6}}, "sft.warmup_steps", "in 5 optimizer steps"),
        ({"cluster": {"num_cpus": 1.0}}, "cluster.num_cpus", "need 2 CPUs"),
        ({"cluster": {"num_cpus": 8.0, "address": "auto"}}, "cluster.num_cpus", "has the CPUs it has"),
        ({"cluster": {"backend": "local"}, "trainer": {"world_size": 2}}, "trainer.world_size", "one process"),
        ({"cluster": {"backend": "local", "address": "auto"}}, "cluster.address", "backend is local"),
        ({"trainer": {"world_size": 4, "mesh": {"tp": 3}}}, "trainer.mesh", "tp 3 is 3 ranks, there are 4"),
        ({"critic": {"mesh": {"cp": 2}}}, "critic.mesh", "cp 2 is 2 ranks, there are 1"),
    ],
)
def test_values_that_do_not_fit_together(tables, path, words):
    error = problem(**tables)
    assert error.path == path
    assert words in str(error)
    assert error.remedy


@pytest.mark.parametrize(
    "value", [None, {1: "a"}, [{"deep": None}], {1, 2}, object()], ids=["none", "key", "deep", "set", "object"]
)
def test_a_table_holds_what_a_file_can_have(value):
    error = problem(env={"options": {"mine": value}})
    assert error.path == "env.options"
    assert "cannot hold this value of mine: TOML has no" in str(error)
    assert "leave it out" in str(error)


def test_a_wrong_object_is_shown_as_it_is():
    assert "trainer.lr = None: must be a number" in str(problem(trainer={"lr": None}))


def test_a_run_without_training_may_be_greedy():
    assert config(steps=0, rollout={"temperature": 0.0}, trainer={"group_size": 1}).steps == 0


def test_conflicts_are_reported_together():
    error = problem(trainer={"num_mini_batches": 3}, rollout={"temperature": 0.0}, buffer={"capacity_groups": 1})
    assert "3 problems" in str(error)
    for path in ("trainer.num_mini_batches", "rollout.temperature", "buffer.capacity_groups"):
        assert path in str(error)


def test_every_field_says_what_it_is():
    def undescribed(model, prefix=""):
        for name, field in model.model_fields.items():
            if not field.description:
                yield prefix + name
            if hasattr(field.annotation, "model_fields"):
                yield from undescribed(field.annotation, f"{prefix}{name}.")

    assert list(undescribed(Config)) == []


def test_a_traceback_shows_the_remedy_once() -> None:
    error = ConfigError("trainer.lr = 3: too large", path="trainer.lr", remedy="give at most 1")
    again = pickle.loads(pickle.dumps(error))
    assert traceback.format_exception_only(again)[-1] == "give at most 1\n"
    assert again.__notes__ == ["give at most 1"]
    assert not hasattr(ConfigError("too large; give at most 1", remedy="give at most 1"), "__notes__")
