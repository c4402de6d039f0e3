"""The pure parts of `bench.curves`: rewards by hand, tasks, agreement, and what is stored."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench import curve_rewards
from bench.curve_tasks import NUM_HELD_OUT, TASKS, person, question, spelled_word, sum_of_two
from bench.curves import (
    Curve,
    HeldOut,
    Results,
    agreement,
    compare,
    compare_times,
    finished_curves,
    plot,
)
from bench.grpo import Step, Turn
from bench.report import names


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


# --- rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("17", 1),
        (" 17.\n", 1),
        ("8 + 9 = 17", 1),
        ("**17**!", 0),  # the stars could be an operator
        ("The sum is (17)", 1),
        ("8 + 9", 0),
        ("0 + 17", 0),
        ("17 +", 0),
        ("17 + 0", 0),
        ("-17", 0),
        ("17.0", 0),
        ("1.17", 0),
        ("017", 0),
        ("117", 0),
        ("17 or 18", 0),
        ("17th", 0),
        ("x17", 0),
        ("", 0),
        ("seventeen", 0),
    ],
)
def test_the_reward_of_sums_reads_the_last_plain_number(text: str, reward: float) -> None:
    assert curve_rewards.sums([messages(text)], ["17"]) == [reward]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("c b a", 1.0),
        (" c b a\n", 1.0),
        ("", 0.0),
        ("x y z", 0.4),  # two spaces match: 2 * 2 / (5 + 5)
        ("c b", 0.75),  # three characters: 2 * 3 / (3 + 5)
        ("cba", 0.75),  # three letters in order: 2 * 3 / (3 + 5)
        ("abc", 0.25),  # one letter: 2 * 1 / (3 + 5)
        ("c b a c b a", 0.625),  # five characters: 2 * 5 / (11 + 5)
    ],
)
def test_the_reward_of_reverse_is_the_ratio_of_matching_characters(
    text: str, reward: float
) -> None:
    assert curve_rewards.reverse([messages(text)], ["c b a"]) == [reward]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"name": "Eva", "age": 34, "city": "Rome"}', 1.0),
        ('\n{"city":"Rome","age":34,"name":"Eva"} ', 1.0),
        ('{"name": "Eva", "age": "34", "city": "Rome"}', 0.1 + 0.2 + 0.7 * 2 / 3),
        ('{"name": "Eva", "age": 34.0, "city": "Rome"}', 0.1 + 0.2 + 0.7 * 2 / 3),
        ('{"name": "Eva", "age": 34}', 0.1 + 0.7 * 2 / 3),
        ('{"name": "Eva", "age": 34, "city": "Rome", "is": 1}', 0.1 + 0.7),
        ("{}", 0.1),
        ('{"name": "Eva", "age": 34, "city": "Rome"} Thank you', 0.0),
        ('```json\n{"name": "Eva", "age": 34, "city": "Rome"}\n```', 0.0),
        ('["Eva", 34, "Rome"]', 0.0),
        ('{"name": "Eva", "age": 34, "ci', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_of_json_is_1_for_the_object_alone(text: str, reward: float) -> None:
    answer = '{"name": "Eva", "age": 34, "city": "Rome"}'
    assert curve_rewards.json_object([messages(text)], [answer]) == [pytest.approx(reward)]


# --- tasks ---------------------------------------------------------------------------------------


def test_problems_have_their_answers() -> None:
    drawn = random.Random(3)
    for _ in range(50):
        asked, answer = sum_of_two(drawn)
        _, _, one, _, other = asked.rstrip("?").split()
        assert int(one) + int(other) == int(answer)
        word, reversed_word = spelled_word(drawn)
        assert (len(word), word) == (9, "".join(reversed(reversed_word)))
        sentence, facts = person(drawn)
        assert all(str(value) in sentence for value in json.loads(facts).values())


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_every_answer_earns_the_full_reward(task) -> None:
    rows = task.held_out()
    reward = getattr(curve_rewards, task.recipe.reward)
    found = reward([messages(row["answer"]) for row in rows], [row["answer"] for row in rows])
    assert found == [1.0] * NUM_HELD_OUT


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_no_problem_is_trained_on_and_held_out(task) -> None:
    held_out = {question(row) for row in task.held_out()}
    assert len(held_out) == NUM_HELD_OUT
    trained = [task.warmup_rows(), *(task.train_rows(seed) for seed in range(3))]
    assert not held_out & {question(row) for rows in trained for row in rows}
    assert len(trained[1]) == task.steps * task.recipe.num_prompts
    assert trained[1] == task.train_rows(0) != trained[2]


# --- figures -------------------------------------------------------------------------------------


def step(reward: float, seconds: float = 2.0) -> Step:
    return Step(seconds, {}, reward, 3.0, 8)


def curve(rewards: list[float], held_out: float = 0.5) -> Curve:
    return Curve([step(reward) for reward in rewards], HeldOut(held_out, 0.25, ["17"]))


def test_curves_agree_within_the_larger_deviation_of_the_seeds_by_hand() -> None:
    # Means 0.6 and 0.7; standard deviations 0.1 and 0.2 (of 0.5, 0.6, 0.7 and of 0.5, 0.7, 0.9).
    found = agreement("x", [0.5, 0.6, 0.7], [0.5, 0.7, 0.9])
    assert (found.value, found.goal, found.ok) == (
        pytest.approx(0.1),
        pytest.approx(0.2),
        True,
    )
    apart = agreement("x", [0.3, 0.4, 0.5], [0.6, 0.7, 0.8])
    assert (apart.value, apart.goal, apart.ok) == (pytest.approx(0.3), pytest.approx(0.1), False)


def test_a_difference_below_the_floor_agrees_whatever_the_seeds_say() -> None:
    assert agreement("x", [0.50], [0.54]).ok
    assert not agreement("x", [0.50], [0.56]).ok


def test_the_end_of_a_curve_is_its_last_quarter() -> None:
    assert curve([0.0] * 6 + [0.2, 0.4]).last_quarter == pytest.approx(0.3)
    assert curve([0.1, 0.7]).last_quarter == 0.7


def test_both_sides_must_gain_reward_from_first_quarter_to_last() -> None:
    rises = [0.1, 0.3, 0.2, 0.2, 0.2, 0.2, 0.4, 0.6]  # 0.2 -> 0.5
    curves = {"hone": [curve(rises, held_out=0.5)], "trl": [curve([0.46] * 8, held_out=0.35)]}
    figures = {figure.name: figure for figure in compare("sums", 0.3, curves)}
    assert figures["sums: rewards at the end, Hone and TRL"].ok
    hone, trl = (figures[f"sums: least reward gained, {side}"] for side in ("Hone", "TRL"))
    assert (hone.value, hone.ok) == (pytest.approx(0.3), True)
    assert (trl.value, trl.ok) == (pytest.approx(0.0), False), "flat"
    assert figures["sums: held-out reward before training"].value == 0.3
    assert figures["sums: held-out reward, TRL"].value == 0.35
    assert figures["sums: a step while learning, Hone"].value == 2.0


def test_a_seed_that_unlearns_misses_the_goal_of_its_side() -> None:
    falls, rises = [0.9] * 4 + [0.1] * 4, [0.1] * 4 + [0.9] * 4
    curves = {"hone": [curve(falls), curve(rises), curve(rises)], "trl": [curve(rises)] * 3}
    figures = {figure.name: figure for figure in compare("sums", 0.3, curves)}
    hone, trl = (figures[f"sums: least reward gained, {side}"] for side in ("Hone", "TRL"))
    assert (hone.value, hone.ok) == (pytest.approx(-0.8), False)
    assert (trl.value, trl.ok) == (pytest.approx(0.8), True)


def test_a_step_is_compared_with_the_faster_trl_of_each_repeat() -> None:
    turns = {
        "Hone": [Turn([step(0, 1.0), step(0, 3.0)], 3.0), Turn([step(0, 2.0)], 3.5)],
        "TRL": [Turn([step(0, 6.0)], 6.0), Turn([step(0, 10.0)], 7.0)],
        "TRL with vLLM": [Turn([step(0, 8.0)], 9.0), Turn([step(0, 4.0)], 9.0)],
    }
    first, memory = compare_times("sums", turns)[:2]
    assert (first.value, first.spread, first.goal) == (2.5, (2.0, 3.0), 2.5)
    assert (memory.value, memory.ok) == (0.5, True)


# --- results -------------------------------------------------------------------------------------


def test_a_finished_run_is_read_again_and_not_under_other_settings(tmp_path: Path) -> None:
    results, task = Results(tmp_path), TASKS["sums"]
    assert results.curve(task, "hone", 1) is None
    results.store(task, "hone", 1, curve([0.25, 0.5]))
    assert results.curve(task, "hone", 1) == curve([0.25, 0.5])
    assert results.curve(task, "trl", 1) is None
    with pytest.raises(ValueError, match=r"sums-hone-1.json has the settings .*'steps'"):
        results.curve(replace(task, steps=task.steps + 1), "hone", 1)


def test_only_a_side_with_all_seeds_has_figures(tmp_path: Path) -> None:
    results, task = Results(tmp_path), TASKS["sums"]
    for seed in (0, 1):
        results.store(task, "hone", seed, curve([0.25]))
    results.store(task, "trl", 0, curve([0.5]))
    assert finished_curves(results, task, [0, 1]) == {"hone": [curve([0.25])] * 2}


def test_the_times_of_a_step_are_read_again(tmp_path: Path) -> None:
    results, task = Results(tmp_path), TASKS["sums"]
    assert results.times(task) == ({}, {})
    turns = {"Hone": [Turn([step(0.5, 1.0)], 3.0)]}
    results.store_times(task, turns, {"TRL": "no memory"})
    assert results.times(task) == (turns, {"TRL": "no memory"})


def test_the_picture_has_a_panel_for_each_task(tmp_path: Path) -> None:
    curves = {"hone": [curve([0.1, 0.2])] * 2, "trl": [curve([0.1, 0.3])] * 2}
    plot({"sums": (0.1, curves), "json": (0.2, {})}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_task_is_refused_with_those_there_are() -> None:
    with pytest.raises(Exception, match="got 'sum', expected some of"):
        names(TASKS)("sums,sum")
