"""Rows of reasoning-gym's data sets have the data sets' scores."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym
import sympy
from reasoning_gym.factory import DATASETS

from asyncrl.rewards import gym
from asyncrl.rewards.match import reasoning_gym_score as compute_score


def test_the_score_is_that_of_the_data_set():
    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=3)[0]
    row = {"entry": json.dumps(entry)}
    right = f"so <answer>{entry['answer']}</answer>"
    assert compute_score("reasoning_gym/leg_counting", right, entry["answer"], row) == 1.0
    assert compute_score("x", right, entry["answer"], {**row, "dataset": "leg_counting"}) == 1.0
    assert compute_score("reasoning_gym/leg_counting", str(entry["answer"]), entry["answer"], row) == 0.0
    assert compute_score("reasoning_gym/leg_counting", str(entry["answer"]), entry["answer"], row, tag="") == 1.0


def test_an_unknown_data_set_or_a_missing_entry_raises():
    with pytest.raises(ValueError, match="no data set 'leg'"):
        compute_score("reasoning_gym/leg", "", "4", {"entry": {}})
    with pytest.raises(ValueError, match=r"needs the row's extra_info\.entry"):
        compute_score("reasoning_gym/leg_counting", "", "4", {})


def score_of(name: str, answer: str) -> float:
    entry = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
    answer = answer.replace("RIGHT", str(entry["answer"]))
    return compute_score(f"reasoning_gym/{name}", answer, None, {"entry": entry}, tag="")


def test_no_answer_is_executed(tmp_path: Path):
    here = tmp_path / "here"
    for name in ("n_queens", "spiral_matrix", "countdown", "simple_integration", "polynomial_multiplication"):
        for way in ("__import__('pathlib').Path({!r}).touch()", "exec('open({!r}, \"w\")')", "open({!r}, 'w')"):
            assert score_of(name, way.format(str(here))) < 0.1
    assert not here.exists()
    cheat = "[c for c in [].__class__.__base__.__subclasses__()]"
    assert (score_of("string_insertion", cheat), score_of("string_insertion", "list('RIGHT')")) == (0.0, 0.0)
    assert score_of("simple_integration", "Integral(RIGHT, x)") == 0.0


def test_no_answer_makes_what_equals_all_else():
    assert score_of("polynomial_multiplication", "Function('f', (Function,), {'__eq__': Tuple})(1)") == 0.0


def test_the_numbers_of_an_answer_are_those_that_it_computes_with():
    for name in ("countdown", "puzzle24"):
        entry = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
        wanted = entry["metadata"].get("target", 24)
        numbers = " + ".join(str(number) for number in entry["metadata"]["numbers"])
        for answer in (f"E / E * {'+'.join(['cos(pi - pi)'] * wanted)} # {numbers}", f"sin(pi) * ({numbers}) + E / E"):
            assert compute_score(f"x/{name}", answer, None, {"entry": entry}, tag="") < 0.1
        assert compute_score(f"x/{name}", entry["answer"], None, {"entry": entry}, tag="") == 1.0


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("puzzle24", "6*4+1-1"),
        ("puzzle24", "RIGHT.0"),
        ("number_sorting", '["\\u006ean"' + ', "\\u006ean"' * 9 + "]"),
        ("number_sorting", str([math.nan] * 10).replace("nan", "NaN")),
        ("complex_arithmetic", "n an"),
        ("complex_arithmetic", "1+nanj"),
        ("coin_flip", "0"),
        ("game_of_life_halting", "True"),
        ("game_of_life_halting", "False"),
        ("game_of_life_halting", "it will"),
    ],
)
def test_no_answer_is_right_for_every_task(name: str, answer: str):
    sizes = {"number_sorting": {"min_numbers": 10, "max_numbers": 10}, "coin_flip": {"max_trials": 9}}
    tasks = list(reasoning_gym.create_dataset(name, size=4, seed=3, **sizes.get(name, {})))
    assert gym.score(tasks[0]["answer"], tasks[0], dataset=name) == 1.0
    scores = [gym.score(answer.replace("RIGHT", each["answer"]), each, dataset=name) for each in tasks]
    assert scores == [float(each["answer"] == answer) for each in tasks]


def test_24_are_made_of_the_numbers_of_the_task_and_not_nearly():
    entry = {"answer": "(3 + 5)*(2 + 1)", "metadata": {"numbers": [3, 2, 5, 1]}}
    for answer, score in (("(1 + 2) * (3 + 5)", 1.0), ("(7 + 1) * (4 - 1)", 0.0), ("(5**2*1 - 1/3)", 0.0)):
        assert gym.score(answer, entry, dataset="puzzle24") == score
    entry = {"answer": "4*6*(10-1)/9", "metadata": {"numbers": [1, 4, 6, 10]}}
    for answer in ("4*6*1**10", "4*6+1//10"):
        assert gym.score(answer, entry, dataset="puzzle24") == 0.0


CONSTANTS = (
    "", "0", "1", "-1", "2", "nan", "inf", "1e999", "nanj", "True", "False", "no", "None", "null", "[]", "{}", "[NaN]",
    "6*4+1-1", "A", "P",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:loadtxt")
@pytest.mark.parametrize("name", sorted({*DATASETS} - {"composite"}))
def test_no_constant_is_right_for_every_task_of_any_set(name: str):
    made = reasoning_gym.create_dataset(name, size=5, seed=3)
    tasks, required = list(made), gym._REQUIRED.get(name)
    for answer in CONSTANTS:
        assert min(gym._scored(made, answer, task, required)["score"] for task in tasks) < 1.0


@pytest.mark.parametrize(
    ("name", "answer", "score"),
    [
        ("countdown", "RIGHT", 1.0),
        ("simple_integration", "RIGHT", 1.0),
        ("simple_integration", "RIGHT + sqrt(2) * log(abs(3)) - 5!", 1.0),
        ("simple_integration", "RIGHT + S(1)/3 * pow(pi, 2) + Rational(1, 3) - 0.2[1] + 1.5j + f(C)", 1.0),
        ("polynomial_multiplication", "RIGHT", 1.0),
        ("bitwise_arithmetic", "RIGHT", 1.0),
        ("number_sorting", "RIGHT", 1.0),
    ],
)
def test_answers_are_computed(name: str, answer: str, score: float):
    assert score_of(name, answer) == score


def test_lists_are_data():
    entry = reasoning_gym.create_dataset("string_insertion", size=1, seed=3)[0]
    assert compute_score("x/string_insertion", repr(list(entry["answer"])), "", {"entry": entry}, tag="") == 0.1


@pytest.mark.parametrize("source", ["(1).real", "f'{1}'", "[1][0]", "x", "print()", "lambda: 1", "1 if 1 else 2"])
def test_what_is_not_data_is_refused(source: str):
    for names in (None, {"x": object(), "print": print}):
        with pytest.raises(ValueError, match="an answer"):
            gym.evaluate(source, names)


@pytest.mark.parametrize(
    "source",
    [
        "[x]", "True", "'x'", "not x", "x | x", "x @ x", "sin", "sin('x')", "sin(*x)", "sin(x, evaluate=0)", "Id(x)",
        "Tuple(x)", "Derivative(x, x)", "Symbol('x y')", "Function('f')", "Function('f', x)", "Function('f')(x)(x)",
        "Piecewise(x)", "polarify(x)", "Rational(1, 1, 2)",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused(source: str):
    with pytest.raises(ValueError, match="an answer"):
        gym.evaluate(source, {**vars(sympy), "x": sympy.Symbol("x")})


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("n_queens", "[0] * 10**12"),
        ("countdown", "(" * 5000),
        pytest.param("n_queens", "9**9**9**9", marks=pytest.mark.slow),
        pytest.param("coin_flip", "1e999999999", marks=pytest.mark.slow),
    ],
)
def test_an_answer_that_exhausts_its_scorer_scores_nothing(name: str, answer: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gym, "_CPU_S", 1)
    assert score_of(name, answer) < 0.1


def test_a_wrong_entry_raises():
    with pytest.raises(ValueError, match="KeyError"):
        compute_score("x/n_queens", "1", "", {"entry": {"answer": "1"}}, tag="")


def test_a_scorer_that_ends_by_no_answer_ends_its_process_likewise(monkeypatch: pytest.MonkeyPatch):
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(gym, "_scored", lambda *_: signal.raise_signal(signal.SIGKILL))
    monkeypatch.setattr(gym.os, "kill", lambda *given: ended.append(given))
    score_of("leg_counting", "1")
    monkeypatch.setattr(gym, "_scored", lambda *_: object())  # which is no JSON
    score_of("leg_counting", "1")
    monkeypatch.setattr(gym.os, "fork", no_fork)
    with pytest.raises(BlockingIOError):
        score_of("leg_counting", "1")
    assert ended == [(os.getpid(), signal.SIGKILL)] * 3


def no_fork() -> int:
    raise BlockingIOError
