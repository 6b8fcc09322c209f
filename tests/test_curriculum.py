"""The curriculum: what it foresees, what its choices depend on, and what a resumed run knows."""

from __future__ import annotations

import json
from collections import Counter

from asyncrl.curriculum import Curriculum, Outcome
from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.trainer.group import TaskChoice

KINDS = ["solved", "mixed", "hopeless", "new"]
OUTCOMES = [
    Outcome(difficulty="solved", rewards=(1.0, 1.0)),
    Outcome(difficulty="mixed", rewards=(1.0, 0.0)),
    Outcome(difficulty="hopeless", rewards=(0.0, 0.0)),
]


def taught(steps: int = 10) -> Curriculum:
    curriculum = Curriculum(seed=7)
    for step in range(1, steps + 1):
        curriculum.learned(step, OUTCOMES)
    return curriculum


def test_groups_without_variance_are_foreseen_and_avoided():
    curriculum = taught()
    # 1 + 0.9 + ... + 0.9 ** 9 = 6.513 groups are remembered: of "solved" none varied, and its mean has not moved.
    assert round(curriculum.score("solved", horizon=10), 4) == round(1 / 7.5132, 4)
    assert curriculum.score("mixed", horizon=10) == curriculum.score("new", horizon=10) == 1.0
    chosen = Counter(KINDS[curriculum.choose(group, KINDS, horizon=10)] for group in range(1000))
    assert chosen["solved"] + chosen["hopeless"] < 10
    assert min(chosen["mixed"], chosen["new"]) > 450


def test_a_kind_that_moves_is_preferred_and_one_that_was_left_is_tried_again():
    curriculum = Curriculum(seed=0)
    for step in range(1, 11):
        rising = Outcome(difficulty="rising", rewards=(float(step > 5), 0.0))
        curriculum.learned(step, [rising, Outcome(difficulty="still", rewards=(0.5, 0.0))])
    assert curriculum.score("rising", horizon=10) > curriculum.score("still", horizon=10) / 2
    stale = [taught().score("solved", horizon=horizon) for horizon in (10, 20, 60)]
    assert stale == sorted(stale)
    assert stale[-1] > 0.9


def test_a_choice_depends_on_nothing_after_its_horizon():
    early, late = taught(5), taught(5)
    for step in range(6, 12):
        late.learned(step, [Outcome(difficulty="mixed", rewards=(0.0, 0.0))])
    groups = range(50)
    assert [early.choose(each, KINDS, horizon=5) for each in groups] == [
        late.choose(each, KINDS, horizon=5) for each in groups
    ]
    assert early.score("mixed", horizon=5) != late.score("mixed", horizon=11)


def test_a_score_is_the_same_however_far_the_steps_have_gone():
    later = taught(400)
    assert later.score("solved", horizon=100) == taught(100).score("solved", horizon=100) < 1
    for horizon in (200, 140):  # a group that was dropped gives its place away
        assert later.choose(7, KINDS, horizon=horizon) == taught(horizon).choose(7, KINDS, horizon=horizon)
        assert later.score("solved", horizon=horizon) == taught(horizon).score("solved", horizon=horizon) < 1


def test_what_a_checkpoint_keeps_is_all_that_it_knows():
    curriculum = taught(200)
    curriculum.choose(0, KINDS, horizon=200)
    state = json.loads(json.dumps(curriculum.state()))
    assert len(state) == 120
    again = Curriculum(seed=7, state=state)
    again.learned(200, OUTCOMES)  # a step that is trained again is not counted twice
    assert again.state() == curriculum.state()
    groups = range(50)
    assert [again.choose(each, KINDS, horizon=200) for each in groups] == [
        curriculum.choose(each, KINDS, horizon=200) for each in groups
    ]


def test_each_group_has_candidates_of_its_own_and_those_issued_again_keep_theirs():
    factory = CalculatorFactory()
    choice = TaskChoice(curriculum=Curriculum(seed=0), environments=factory, candidates=4, chosen={3: 5})
    numbers = [choice.choose(group, horizon=0) for group in range(8)]
    assert numbers[3] == 5
    assert all(number // 4 == group for group, number in enumerate(numbers) if group != 3)
    assert factory.difficulty(factory.task(0, split="train")) in {"1 operations", "2 operations"}
