"""Which problems are skipped, worked out by hand, and that it does not depend on when one asks."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from services.orchestrator.data.choosing import select_problems
from services.orchestrator.data.order import History, SkippingOrder, Verdict, Verdicts
from services.orchestrator.data.tables import InlineTable
from services.orchestrator.grpo.groups import verdicts_of
from services.orchestrator.samplers.clients import NOT_GRADED
from shared.wire import RolloutGroup
from tests.support.job_records import job_with
from tests.support.scored_batches import make_batch, make_job, make_rollout, score


def order(
    history: History, count: int = 6, *, prompts: int = 2, staleness: int = 0, **difficulty: int
) -> SkippingOrder:
    """Of rows "0" to "<count - 1>", in the order of the file."""
    job = job_with(
        steps=100,
        max_staleness=staleness,
        data={"train": "x", "shuffle": False},
        sampling={"prompts_per_step": prompts, "refills": 2},
        difficulty=difficulty,
    )
    rows = tuple({"prompt": str(number)} for number in range(count))
    _, problems = select_problems(InlineTable("rows", rows), job.data)
    return SkippingOrder(job, problems, history)


def taken(order: SkippingOrder, step: int, round: int = 0) -> list[int]:
    return [problem.index for problem in order.take(step, round)]


def seen(*steps: Verdicts) -> History:
    """What came of steps 1, 2 and so on."""
    return History(dict(enumerate(steps, 1)))


def test_a_problem_that_was_all_right_is_not_taken_again() -> None:
    history = seen({0: "right", 1: "mixed"}, {2: "wrong", 3: "mixed"}, {4: "mixed", 5: "right"})
    walk = order(history, skip_right=1)
    # the second pass leaves out 0 and 5, and so does the third
    assert [taken(walk, step) for step in range(1, 7)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [1, 2],
        [3, 4],
        [1, 2],
    ]
    assert [walk.num_skipped(step) for step in (3, 4)] == [1, 2]


def test_a_problem_is_skipped_after_so_many_groups_in_a_row() -> None:
    wrong: Verdicts = {0: "wrong", 1: "wrong"}
    history = seen(wrong, {0: "wrong", 1: "mixed"}, wrong)
    walk = order(history, count=2, prompts=1, skip_wrong=2)
    # 0 after step 2; 1 was mixed in between, so step 3 is its first one again
    assert [walk.num_skipped(step) or taken(walk, step)[0] for step in (1, 2)] == [0, 1]
    assert (taken(walk, 3), walk.num_skipped(3)) == ([1], 1)
    assert (taken(walk, 4), walk.num_skipped(4)) == ([1], 1)
    history.note(4, {1: "wrong"})
    taken(walk, 5)
    assert walk.num_skipped(5) == 2


def test_right_and_wrong_are_counted_apart() -> None:
    history = seen({0: "right"}, {0: "wrong"}, {0: "right"})
    walk = order(history, skip_right=2, skip_wrong=2)
    taken(walk, 4)
    assert walk.num_skipped(4) == 0
    only_right = order(seen({0: "wrong", 1: "right"}), skip_right=1)
    taken(only_right, 2)
    assert only_right.num_skipped(2) == 1


def test_a_problem_comes_back_after_a_while_and_goes_again_if_nothing_has_changed() -> None:
    history = seen({0: "right", 1: "mixed"})
    walk = order(history, count=2, prompts=1, skip_right=1, skip_steps=2)
    # its last group was in step 1: steps 2 and 3 leave it out
    assert [taken(walk, step) for step in (1, 2, 3, 4)] == [[0], [1], [1], [0]]
    history.note(4, {0: "right"})
    assert [taken(walk, step) for step in (5, 6, 7)] == [[1], [1], [0]]


def test_a_step_knows_no_group_that_may_still_be_under_way() -> None:
    history = seen({0: "right", 1: "right"}, {2: "right", 3: "right"})
    walk = order(history, count=4, staleness=1, skip_right=1)
    assert taken(walk, 3) == [2, 3], "step 2 may be under way, step 1 is done"
    assert walk.num_skipped(3) == 2
    taken(walk, 2)
    assert walk.num_skipped(2) == 0


def test_which_problems_a_step_takes_does_not_depend_on_when_it_is_asked() -> None:
    """The one asks as a job does, step by step; others later, when more is known, in any order."""
    history, then = History(), list[Any]()
    names: tuple[Verdict, ...] = ("right", "wrong", "mixed")
    walk = order(history, count=20, prompts=3, staleness=1, skip_right=1, skip_wrong=2)
    for step in range(1, 40):
        then.append([taken(walk, step, round) for round in range(3)])
        if step > 1:  # a step is done while the next one is sampled
            history.note(step - 1, {number: names[number * step % 3] for number in then[-2][0]})
    again = order(history, count=20, prompts=3, staleness=1, skip_right=1, skip_wrong=2)
    for step in (39, 7, 8, 30, 1):
        assert [taken(again, step, round) for round in range(3)] == then[step - 1]


def test_where_too_few_are_left_skipped_ones_are_taken() -> None:
    history = seen({0: "right", 1: "right"}, {2: "right", 3: "mixed"})
    walk = order(history, count=4, skip_right=1)
    assert [taken(walk, step) for step in (1, 2, 3, 4)] == [[0, 1], [2, 3], [3, 0], [3, 0]]
    few = order(History(), count=1, prompts=3, skip_right=1)
    assert taken(few, 1) == [0, 0, 0], "as without skipping"


def skipped_at(history: History, step: int, right: int, wrong: int, steps: int) -> int:
    """The same from all groups before `step`, problem by problem."""
    groups: dict[int, list[tuple[Verdict, int]]] = {}
    for before in range(1, step):
        for number, verdict in history.of(before).items():
            groups.setdefault(number, []).append((verdict, before))
    num = 0
    for of_problem in groups.values():
        last, last_step = of_problem[-1]
        _, alike = next(itertools.groupby(reversed(of_problem), key=lambda group: group[0]))
        enough = {"right": right, "wrong": wrong, "mixed": 1000}[last]
        num += len(list(alike)) >= enough and step <= last_step + steps
    return num


@pytest.mark.parametrize("seed", range(5))
def test_what_is_skipped_is_what_all_groups_before_say(seed: int) -> None:
    choose = random.Random(seed)
    history = History()
    walk = order(history, count=8, prompts=3, skip_right=1, skip_wrong=2, skip_steps=5)
    for step in range(1, 60):
        numbers = taken(walk, step)
        assert walk.num_skipped(step) == skipped_at(history, step, right=1, wrong=2, steps=5)
        verdicts: list[Verdict] = ["right", "wrong", "mixed"]
        history.note(step, {number: choose.choice(verdicts) for number in numbers})
    again = order(history, count=8, prompts=3, skip_right=1, skip_wrong=2, skip_steps=5)
    assert [taken(again, step) for step in (59, 58)] == [taken(walk, step) for step in (59, 58)]


def test_how_many_are_skipped_waits_for_no_one_who_takes_problems() -> None:
    walk = order(seen({0: "right"}), skip_right=1)
    taken(walk, 2)
    with ThreadPoolExecutor(1) as pool, walk._turn:
        assert pool.submit(walk.num_skipped, 2).result(5) == 1


def test_no_group_is_replaced_by_a_skipped_problem() -> None:
    history = seen({0: "right", 1: "right"})
    walk = order(history, count=6, skip_right=1)
    assert taken(walk, 2) == [2, 3]
    assert sorted(taken(walk, 2, round=1)) == [4, 5] and taken(walk, 2, round=2) == []


def test_a_step_that_came_out_otherwise_counts_as_it_did_last() -> None:
    history = seen({0: "right", 1: "mixed"})
    walk = order(history, count=3, prompts=1, skip_right=1)
    assert taken(walk, 4) == [1]
    assert history.note(1, {0: "mixed", 1: "mixed"}) and not history.note(1, history.of(1))
    assert taken(walk, 4) == [0]


def test_verdicts_are_of_whole_groups_replaced_ones_included() -> None:
    job = make_job({"grader": "right", "weight": 2.0}, {"grader": "form", "shaping": True})
    right, wrong, half = score(job, 1.0, 0.5), score(job, 0.0, 0.5), score(job, 0.5, 0.5)
    batch = make_batch(
        (right, right),
        (wrong, wrong),
        (half, half),
        (right, wrong),
        (right, score(job, 1.0, 0.0)),  # differ in form alone
        (right, score(job, None, 0.5)),
        (NOT_GRADED, NOT_GRADED),
        indices=range(10, 17),
        dropped=((wrong, wrong),),
        dropped_prompts=(3,),
    )
    found = verdicts_of(batch, job)
    assert found == {3: "wrong", 10: "right", 11: "wrong", 12: "wrong", 13: "mixed", 14: "right"}


def test_a_group_is_all_right_with_the_full_mark_of_what_applies() -> None:
    job = make_job({"grader": "right"}, {"grader": "code"})
    full = score(job, 1.0, "skipped")
    assert verdicts_of(make_batch((full, full)), job) == {0: "right"}


def test_a_problem_that_comes_twice_in_a_step_has_one_verdict() -> None:
    job = make_job({"grader": "right"})
    right, wrong, missing = score(job, 1.0), score(job, 0.0), score(job, None)
    batch = make_batch(
        *((right, wrong), (wrong, wrong), (right, right), (wrong, wrong), (right, missing)),
        indices=(7, 7, 8, 8, 9),
        dropped=((right, right), (right, missing)),
        dropped_prompts=(6, 9),
    )
    assert verdicts_of(batch, job) == {6: "right", 7: "mixed", 8: "mixed", 9: "right"}


def test_a_group_whose_turns_differ_is_mixed_although_its_rewards_are_equal() -> None:
    """Both earn 1: one by its first answer, one by its second."""
    own = {"environment": {"kind": "worker"}, "rewards": [{"grader": "environment"}]}
    by_episode, job = job_with(**own), job_with(**own, advantages={"credit": "turns"})
    rollouts = tuple(
        make_rollout(2).model_copy(update={"turns": (0, 1), "info": {"turn_rewards": rewards}})
        for rewards in ([1.0, 0.0], [0.0, 1.0])
    )
    groups = tuple(
        RolloutGroup(prompt_token_ids=(1,), rollouts=each) for each in (rollouts, rollouts[:1] * 2)
    )
    found = score(job, 1.0)
    batch = make_batch((found, found), (found, found), indices=(5, 6), groups=groups)
    assert verdicts_of(batch, job) == {5: "mixed", 6: "right"}
    assert verdicts_of(batch, by_episode) == {5: "right", 6: "right"}
