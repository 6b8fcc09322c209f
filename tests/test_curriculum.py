"""The curriculum: what it foresees, what its choices depend on, and what a resumed run knows."""

from __future__ import annotations

import json
from collections import Counter

from asyncrl.curriculum import Candidate, Curriculum, Outcome
from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.interfaces import GroupSummary
from asyncrl.trainer.group import Group, TaskChoice

KINDS = [Candidate(task=task, difficulty=name) for task, name in enumerate(("solved", "mixed", "hopeless", "new"))]
SOLVED, MIXED, HOPELESS, NEW = KINDS
OUTCOMES = [
    Outcome(candidate=SOLVED, rewards=(1.0, 1.0)),
    Outcome(candidate=MIXED, rewards=(1.0, 0.0)),
    Outcome(candidate=HOPELESS, rewards=(0.0, 0.0)),
]


def taught(steps: int = 10) -> Curriculum:
    curriculum = Curriculum(seed=7)
    for step in range(1, steps + 1):
        curriculum.learned(step, OUTCOMES)
    return curriculum


def test_groups_without_variance_are_foreseen_and_avoided():
    curriculum = taught()
    # 1 + 0.9 + ... + 0.9 ** 9 = 6.513 groups are remembered, in the prior 1 + 0.98 + ... = 9.146: of "solved" none
    # varied, and its mean has not moved.
    assert round(curriculum.score("solved", horizon=10), 4) == round(2 / 10.1464 / 8.5132, 4)
    assert curriculum.score("mixed", horizon=10) == curriculum.score("new", horizon=10) == 1.0
    chosen = Counter(
        curriculum.choose(group, KINDS, horizon=10) for group in range(1, 3000, 3)
    )  # none is offered again
    assert chosen[SOLVED] + chosen[HOPELESS] < 10
    assert min(chosen[MIXED], chosen[NEW]) > 300


def test_a_task_that_was_right_and_wrong_is_tried_again_by_one_group():
    curriculum = Curriculum(seed=7)
    seen = Candidate(task=MIXED.task, difficulty="mixed", seen=True)
    curriculum.learned(5, OUTCOMES)
    offered = [curriculum.choose(group, [HOPELESS], horizon=5) for group in range(30, 33)]
    assert offered == [HOPELESS, seen, HOPELESS]
    assert curriculum.choose(31, [HOPELESS], horizon=6) == HOPELESS
    assert seen.kind == "mixed, seen"
    curriculum.learned(6, [Outcome(candidate=seen, rewards=(1.0,) * 7 + (0.0,))])  # nearly solved
    assert curriculum.choose(31, [HOPELESS], horizon=6) == HOPELESS


def test_a_kind_that_moves_is_preferred_and_one_that_was_left_is_tried_again():
    curriculum = Curriculum(seed=0)
    for step in range(1, 11):
        rising = Outcome(candidate=Candidate(task=0, difficulty="rising"), rewards=(float(step > 5), 0.0))
        still = Outcome(candidate=Candidate(task=1, difficulty="still"), rewards=(0.5, 0.0))
        curriculum.learned(step, [rising, still])
    assert curriculum.score("rising", horizon=10) > curriculum.score("still", horizon=10) / 2
    stale = [taught().score("solved", horizon=horizon) for horizon in (10, 20, 60, 200)]
    assert stale == sorted(stale)
    assert stale[0] < 0.1
    assert stale[-1] > 0.8


def test_a_choice_depends_on_nothing_after_its_horizon():
    early, late = taught(5), taught(5)
    for step in range(6, 12):
        late.learned(step, [Outcome(candidate=MIXED, rewards=(0.0, 0.0))])
    groups = range(50)
    assert [early.choose(each, KINDS, horizon=5) for each in groups] == [
        late.choose(each, KINDS, horizon=5) for each in groups
    ]
    assert early.score("mixed", horizon=5) != late.score("mixed", horizon=11)


def test_a_score_is_the_same_however_far_the_steps_have_gone():
    later = taught(1000)
    assert later.score("solved", horizon=300) == taught(300).score("solved", horizon=300) < 1
    for horizon in (600, 550):  # a group that was dropped gives its place away
        assert later.choose(7, KINDS, horizon=horizon) == taught(horizon).choose(7, KINDS, horizon=horizon)
        assert later.score("solved", horizon=horizon) == taught(horizon).score("solved", horizon=horizon) < 1


def test_what_a_checkpoint_keeps_is_all_that_it_knows():
    curriculum = taught(500)
    curriculum.choose(0, KINDS, horizon=500)
    state = json.loads(json.dumps(curriculum.state()))
    assert len(state) == 400
    again = Curriculum(seed=7, state=state)
    again.learned(500, OUTCOMES)  # a step that is trained again is not counted twice
    assert json.loads(json.dumps(again.state())) == state
    groups = range(50)
    assert [again.choose(each, KINDS, horizon=500) for each in groups] == [
        curriculum.choose(each, KINDS, horizon=500) for each in groups
    ]


def test_each_group_has_candidates_of_its_own_and_those_issued_again_keep_theirs():
    factory = CalculatorFactory()
    choice = TaskChoice(curriculum=Curriculum(seed=0), environments=factory, candidates=4, chosen={3: 5})
    numbers = [choice.choose(group, horizon=0) for group in range(8)]
    assert numbers[3] == 5
    assert all(number // 4 == group for group, number in enumerate(numbers) if group != 3)
    summary = GroupSummary(
        group_id=5, rows=2, oldest_version=0, tokens=2, version_tokens={0: 2}, rewards=(1.0, 0.0), lengths=(1, 1)
    )
    choice.learned(1, [Group(group_id=5, task=numbers[5], summary=summary)])
    again = Counter(choice.choose(group, horizon=1) for group in range(8, 58))
    assert 0 < again[numbers[5]] < 50
    assert factory.difficulty(factory.task(0, split="train")) in {"1 operations", "2 operations"}
