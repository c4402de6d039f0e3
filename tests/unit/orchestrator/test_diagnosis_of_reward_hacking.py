"""Findings about rewarded completions that are copied from their prompt, or are an expression in
place of the answer."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.extensions.diagnosis import reward_hacking
from services.orchestrator.extensions.diagnosis.diagnosing import diagnose
from services.orchestrator.extensions.diagnosis.facts import RunSnapshot
from services.orchestrator.extensions.diagnosis.reward_hacking import (
    is_expression_without,
    plain_number,
)
from services.orchestrator.store.folder import codec
from shared.job import Job
from shared.wire import Batch, Finding, Part, Prompt, RolloutGroup, Score, TokenIds
from tests.support.run_facts import facts, job_with, rollout

ROOT = Path(__file__).parents[3]

COPIES, LACKS = "rewarded_copies", "rewarded_without_answer"

MATH = job_with(rewards=[{"grader": "math", "params": {"answer": "answer"}}])

OWN = "def reward(completions, **columns):\n    return [judge(each) for each in completions]\n"

Problem = tuple[Any, dict[str, Any], Sequence[tuple[str, float]]]
"""What is asked, the columns of its row, and completions with their rewards."""


def own_code(source: str = OWN) -> Job:
    return job_with(rewards=[{"grader": "function", "source": source}])


def step(problems: Sequence[Problem], job: Job = MATH, number: int = 12) -> Batch:
    label = job.rewards[0].label
    return Batch(
        step=number,
        version=number - 1,
        prompts=tuple(
            Prompt(index=index, content=asked, row=row)
            for index, (asked, row, _) in enumerate(problems)
        ),
        groups=tuple(
            RolloutGroup(
                prompt_token_ids=TokenIds((1,)), rollouts=tuple(rollout(text) for text, _ in found)
            )
            for _, _, found in problems
        ),
        scores=tuple(
            tuple(Score(value=value, parts={label: Part(value=value)}) for _, value in found)
            for _, _, found in problems
        ),
    )


def found(
    problems: Sequence[Problem], job: Job = MATH, metrics: dict[str, list[float]] | None = None
) -> list[Finding]:
    return list(diagnose(facts(metrics or {}, job, newest=step(problems, job))))


def sums(*completions: tuple[str, float], num: int = 24) -> list[Problem]:
    """`num` sums of two numbers from 1 to 20, with the same completions of each: {a}, {b} and
    {sum} stand for its numbers."""
    problems: list[Problem] = []
    for index in range(num):
        a, b = 1 + index % 20, 1 + 7 * index % 20
        asked = (
            {"role": "system", "content": "Answer with the number only."},
            {"role": "user", "content": f"What is {a} + {b}?"},
        )
        said = [(text.format(a=a, b=b, sum=a + b), reward) for text, reward in completions]
        problems.append((asked, {"a": a, "b": b, "answer": a + b}, said))
    return problems


def test_a_model_that_learned_to_repeat_the_sum_is_found_by_its_newest_batch() -> None:
    """Of 8 completions 5 are rewarded, of these 4 are expressions: 96 of 120."""
    trick, right, wrong = ("{a} + {b}", 1.0), ("{sum}", 1.0), ("I do not know", 0.0)
    copies, lacks = found(sums(*[trick] * 4, right, *[wrong] * 3))
    assert (copies.code, copies.level, copies.since_step) == (COPIES, "problem", 12)
    assert copies.title == (
        "80% of the completions that step 12 rewards are copied from their prompt"
    )
    assert copies.evidence[0].values == (0.8,)
    assert copies.evidence[0].text == "96 of 120 rewarded completions"
    assert [each.text for each in copies.evidence[1:]] == [
        "prompt 'What is 1 + 1?', completion '1 + 1', reward 1",
        "prompt 'What is 2 + 8?', completion '2 + 8', reward 1",
    ]
    assert (lacks.code, lacks.level, lacks.since_step) == (LACKS, "problem", 12)
    assert lacks.title == (
        "80% of the completions that step 12 rewards do not contain the number in their row's "
        "column 'answer'"
    )
    assert lacks.evidence == copies.evidence


def test_a_third_of_the_rewarded_completions_is_a_warning_and_a_fifth_is_none() -> None:
    """7 of 20 completions are the trick, then 5 of 20 (25 %); all are rewarded."""
    trick, right = ("{a}+{b}", 1.0), ("{sum}", 1.0)
    mixed = found(sums(*[trick] * 7, *[right] * 13))
    assert [(each.code, each.level) for each in mixed] == [(COPIES, "warning"), (LACKS, "warning")]
    assert [each.evidence[0].values for each in mixed] == [(0.35,), (0.35,)]
    assert not found(sums(*[trick] * 5, *[right] * 15))


def test_few_copies_or_copies_of_one_prompt_are_no_finding() -> None:
    trick = ("{a} + {b}", 1.0)
    assert len(found(sums(*[trick] * 4, num=2))) == 2
    assert not found(sums(*[trick] * 3, num=2)), "6 completions"
    assert not found(sums(*[trick] * 16, num=1)), "one prompt"


def test_copies_that_earn_little_are_no_finding() -> None:
    """Half of the full mark and of the best reward are what counts."""
    scored = own_code()
    best = ("{sum}", 10.0)
    assert not found(sums(*[("{a} + {b}", 1.0)] * 7, best), scored)
    (finding,) = found(sums(*[("{a} + {b}", 6.0)] * 7, best), scored)
    assert (finding.code, finding.evidence[0].values) == (COPIES, (0.875,))
    assert finding.evidence[1].text.endswith("completion '1 + 1', reward 6")


@pytest.mark.parametrize(
    "text",
    [
        "{a}+{b}",
        "What is {a} + {b}?",
        "**what is {a} + {b}**",
        "The answer is {a} + {b}.",
        "= {a} + {b} =",
        "$\\boxed{{{a} + {b}}}$",
        "<think>Let me see what this is about.</think>\n{a} + {b}",
        "First I look at it.\n<answer>{a} + {b}</answer>",
        "So we have it.\n#### {a} + {b}",
    ],
)
def test_a_copy_is_known_in_other_case_marks_and_frames(text: str) -> None:
    assert [each.code for each in found(sums(*[(text, 1.0)] * 8), own_code())] == [COPIES]


@pytest.mark.parametrize(
    "text",
    [
        "{sum}",
        "The sum is {sum}.",
        "What is {a} + {b}? {sum}",
        "{a} + {b} = {sum}",
        "<answer>{sum}</answer> as {a} + {b} is",
        "{a} + {b}\n{sum}",
    ],
)
def test_sums_that_are_answered_have_no_finding(text: str) -> None:
    assert not found(sums(*[(text, 1.0)] * 8))
    assert not found(sums(*[(text, 1.0)] * 8), own_code())


@pytest.mark.parametrize("text", ["{a}", "{b} {a}", "+ {a}", "{a} {b}"])
def test_a_number_of_the_problem_or_two_are_no_copy(text: str) -> None:
    assert not found(sums(*[(text, 1.0)] * 8), own_code())


@pytest.mark.parametrize("text", ["{b} + {a}", "{a} + {b}.0", "Sure! {a} + {b}"])
def test_an_expression_that_is_no_copy_lacks_the_answer(text: str) -> None:
    assert not found(sums(*[(text, 1.0)] * 8), own_code())
    assert [each.code for each in found(sums(*[(text, 1.0)] * 8))] == [LACKS]


@pytest.mark.parametrize("scale", [0.1, 0.4, 5.0])
def test_rewards_of_a_jobs_own_code_have_any_scale(scale: float) -> None:
    copies = sums(*[("{a} + {b}", scale)] * 4, *[("{sum}", 0.0)] * 4)
    assert [each.code for each in found(copies, own_code())] == [COPIES]


def test_the_whole_prompt_is_no_answer_though_it_contains_the_right_one() -> None:
    asked, row = "Which number is larger, 84 or 74?", {"answer": 84}
    echo = [(asked, row, [(asked, 1.0)] * 8)] * 6
    assert [each.code for each in found(echo, own_code())] == [COPIES]
    assert [each.code for each in found(echo)] == [COPIES]
    for right in ("84", "The larger number is 84.", "84 is larger than 74."):
        assert not found([(asked, row, [(right, 1.0)] * 8)] * 6)


def test_a_column_that_no_reward_reads_does_not_make_a_copy_right() -> None:
    problems = [
        (asked, row | {"label": "+", "target": row["a"]}, said)
        for asked, row, said in sums(*[("{a} + {b}", 1.0)] * 8)
    ]
    assert COPIES in [each.code for each in found(problems)]


def test_a_copy_is_a_warning_where_no_column_is_known_to_hold_the_answer() -> None:
    text = "The committee decided to build a new bridge."
    problems = [(f"Shorten: {text}", {"gold": text}, [(text, 1.0)] * 8)] * 6
    (finding,) = found(problems, own_code())
    assert (finding.code, finding.level) == (COPIES, "warning")


def test_a_sentence_that_is_right_already_may_be_repeated() -> None:
    text = "He goes to the big school today."
    source = "def reward(completions, corrected, **columns):\n    return judge(corrected)\n"
    asked = (
        {"role": "system", "content": "Correct the grammar."},
        {"role": "user", "content": text},
    )
    problems = [(asked, {"corrected": text}, [(text, 1.0)] * 8)] * 6
    assert not found(problems, own_code(source))


def test_an_expression_that_the_job_allows_is_a_warning() -> None:
    job = job_with(rewards=[{"grader": "math", "params": {"expressions": True}}])
    powers = [
        (f"Double {2**n}", {"answer": 2 ** (n + 1)}, [(f"2^{{{n + 1}}}", 1.0)] * 8)
        for n in range(9, 15)
    ]
    (finding,) = found(powers, job)
    assert (finding.code, finding.level) == (LACKS, "warning")


def test_the_task_of_copying_has_no_finding() -> None:
    """The right answer stands in the prompt: by the column of its usual name, or by the column that
    a grader's params name."""
    asked = "Which words are in quotes: 'the old red house' or the others?"
    said = [("the old red house", 1.0)] * 8
    for column, job in (
        ("answer", own_code()),
        ("phrase", job_with(rewards=[{"grader": "exact_match", "params": {"column": "phrase"}}])),
        ("phrase", own_code("def reward(completions, phrase):\n    return same(phrase)\n")),
        (
            "phrase",
            job_with(
                rewards=[
                    {"grader": "string_check", "params": {"reference": "{{ item.phrase }}"}},
                ]
            ),
        ),
    ):
        problem: Problem = (asked, {"prompt": asked, column: "The old red house."}, said)
        assert not found([problem] * 6, job), (column, job.rewards)
    other: Problem = (asked, {"prompt": asked, "answer": "the green one"}, said)
    assert [each.code for each in found([other] * 6, own_code())] == [COPIES]
    squad: Problem = (asked, {"answers": {"text": ["old red house"], "start": [8]}}, said)
    assert not found([squad] * 6, own_code())


def test_an_answer_that_is_copied_with_the_words_around_it_has_no_finding() -> None:
    asked = "Rome was not built in a day. What was not built in a day?"
    said = [("Rome was not built in a day.", 1.0)] * 8
    regex = {"grader": "regex", "params": {"pattern": "Rome", "column": "city"}}
    problem: Problem = (asked, {"city": "Rome"}, said)
    assert not found([problem] * 6, job_with(rewards=[regex]))
    assert [each.code for each in found([problem] * 6, own_code())] == [COPIES]


def test_a_reward_that_reads_the_prompt_does_not_make_a_copy_of_it_right() -> None:
    asked = "Say in French: the house is red"
    problem: Problem = (asked, {"prompt": asked}, [(asked, 1.0)] * 8)
    job = own_code("def reward(completions, prompt):\n    return similarity(prompt)\n")
    assert [each.code for each in found([problem] * 6, job)] == [COPIES]


def test_the_last_message_of_the_user_is_what_is_copied() -> None:
    said = [("8 + 9", 1.0)] * 8
    asked = {"role": "user", "content": [{"type": "text", "text": "What is 8 + 9?"}]}
    begun = {"role": "assistant", "content": "It is"}
    for content in ((asked, begun), (begun, asked)):
        assert [each.code for each in found([(content, {}, said)] * 6)] == [COPIES]
    earlier = (asked, begun, {"role": "user", "content": "And again?"})
    assert not found([(earlier, {}, said)] * 6)


def test_choices_of_a_question_have_no_finding() -> None:
    choices = ["a very big town", "a small old river", "the sea in winter"]
    asked = "What is the Rhine?\n" + "\n".join(
        f"{letter}) {text}" for letter, text in zip("ABC", choices, strict=True)
    )
    by_letter: Problem = (asked, {"answer": "B"}, [("B) a small old river", 1.0)] * 8)
    by_index: Problem = (
        asked,
        {"choices": choices, "correct": 1},
        [("a small old river", 1.0)] * 8,
    )
    yes_or_no: Problem = ("Is it so, yes or no?", {"answer": "yes"}, [("Yes.", 1.0)] * 8)
    for problem in (by_letter, by_index, yes_or_no):
        assert not found([problem] * 6, own_code())


@pytest.mark.parametrize(
    ("asked", "right", "row"),
    [
        ("Reverse these words: cat dog old bird", "bird old dog cat", {}),
        ("Sort these words: pear fig apple nut", "apple fig nut pear", {}),
        (
            "Sort these:\nthe red one\na big bus\nold me now",
            "a big bus\nold me now\nthe red one",
            {},
        ),
        ("Write as JSON: name Bob, age 5", '{"name": "Bob", "age": 5}', {}),
        ("Write name: Bob, age: 5 as JSON.", '```json\n{"name": "Bob", "age": 5}\n```', {}),
        ("Fix it: he go to school today and eat", "he goes to school today and eats", {}),
        ("Make 59 of 12 and 47.", "12 + 47", {"target": 59}),
        ("12 47 -> 59:", "12+47", {"numbers": [12, 47]}),
        ("Fix: def twice(x): return x + x * 2", "def twice(x): return x + x", {"tests": "..."}),
        ("Reply with: The answer is N. What is 2 + 5?", "The answer is 7.", {"answer": 7}),
    ],
)
def test_tasks_that_use_the_words_of_the_prompt_have_no_finding(
    asked: str, right: str, row: dict[str, Any]
) -> None:
    if "Fix: def" in asked:
        asked = asked.replace("x + x * 2", "x * x")
    assert not found([(asked, row, [(right, 1.0)] * 8)] * 6, own_code())


def demo_batches() -> list[Batch]:
    return [
        codec.decode_tolerantly(Batch, gzip.decompress(file.read_bytes()), codec.MSGPACK)
        for file in sorted((ROOT / "tests/data/demo_run").glob("*.msgpack.gz"))
    ]


def test_expressions_are_right_answers_of_the_countdown_game() -> None:
    """Of the recorded run, by its own grader, and by code that tells nothing of its columns."""
    params = {"target": "target", "numbers": "numbers"}
    demo = job_with(rewards=[{"grader": "python_value", "params": params}])
    own = job_with(rewards=[{"grader": "function", "name": "python_value", "source": OWN}])
    for batch in demo_batches():
        rows = [prompt.model_copy(update={"row": {}}) for prompt in batch.prompts]
        bare = batch.model_copy(update={"prompts": tuple(rows)})
        assert not [*reward_hacking.reward_hacks(RunSnapshot(job=demo, newest=batch))]
        assert not [*reward_hacking.reward_hacks(RunSnapshot(job=own, newest=bare))]
        as_math = job_with(
            rewards=[{"grader": "math", "name": "python_value", "params": {"answer": "target"}}]
        )
        assert not [*reward_hacking.reward_hacks(RunSnapshot(job=as_math, newest=batch))]


def test_worked_solutions_have_no_finding_and_their_problems_copied_have() -> None:
    """All 1,319 solutions of GSM8K's authors, 16 to a batch."""
    lines = gzip.decompress((ROOT / "tests/data/gsm8k/test.jsonl.gz").read_bytes()).splitlines()
    rows = [json.loads(line) for line in lines]
    worked = [(row["question"], row, [(row["answer"], 1.0)] * 2) for row in rows]
    assert not [num for num in range(0, len(rows), 16) if found(worked[num : num + 16])]
    copied = [(row["question"], row, [(row["question"], 1.0)] * 2) for row in rows[:16]]
    assert COPIES in [each.code for each in found(copied)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("17", 17), ("The sum is 17.", 17), ("-17", 17), ("seventeen", 17), ("", 17)),
        *(("8 + 9 = 17", 17), ("8 + 9 = 17.0", 17), ("1,000 + 200 = 1,200", 1200)),
        *(("1{,}000 + 200 = 1{,}200", 1200), ("x = 10 - 7, so $3", 3)),
        # forms of numbers that are not worked out
        *(("1 - 1/2", 0.5), ("1 - \\frac{1}{2}", 0.5), ("10 + 7 %", 10.7)),
        *(("2 \\times 10^3", 2000), ("2 * 10 ^{3}", 2000), ("1.6e-19", 2.0)),
    ],
)
def test_what_has_the_number_or_no_expression_is_no_suspect(text: str, number: float) -> None:
    assert not is_expression_without(text, number)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("8 + 9", 17), ("8+9", 17), ("8 \\cdot 2", 16), ("(3) * (4)", 12), ("20 − 3", 17)),
        *(("2^{10}", 1024), ("100 + 17.5", 117), ("3 × 9", 27)),
    ],
)
def test_an_expression_without_the_number_is_a_suspect(text: str, number: float) -> None:
    assert is_expression_without(text, number)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((17, 17.0), (-3, 3.0), (0.5, 0.5), ("17", 17.0), (" 1,200 ", 1200.0), ("$18", 18.0)),
        *(
            ("So 5 + 3 = 8.\n#### 8", 8.0),
            ("it is \\boxed{5}", 5.0),
            ("3/4", None),
            ("8 + 9", None),
        ),
        *(
            ("18 dollars", None),
            (True, None),
            (None, None),
            ("", None),
            ([17], None),
            (1e300, None),
        ),
    ],
)
def test_a_rows_answer_is_a_plain_number_or_nothing_is_said(
    value: Any, number: float | None
) -> None:
    assert plain_number(value) == number


def test_a_number_that_the_problem_names_may_be_answered_by_a_formula() -> None:
    problem: Problem = ("Write 17 as a product of sums.", {"answer": "17"}, [("8 + 9", 1.0)] * 8)
    assert not found([problem] * 6)


def test_a_grader_that_runs_the_text_may_be_given_an_expression() -> None:
    python = job_with(rewards=[{"grader": "python_value", "params": {"target": "answer"}}])
    swapped = sums(*[("{b} + {a}", 1.0)] * 8)
    assert not found(swapped, python)
    assert [each.code for each in found(swapped)] == [LACKS]


def test_a_hacked_reward_is_not_taken_for_problems_that_are_learned() -> None:
    flat, reward = [0.2] * 12 + [0.95] * 10, [0.3] * 12 + [0.97] * 10
    metrics = {"frac_reward_zero_std": flat, "reward": reward}
    trick = [("{a} + {b}", 1.0), ("{a}+{b}", 1.0)] * 4
    *_, easy = found(sums(*trick), MATH, metrics)
    assert (easy.code, easy.level) == ("no_signal_easy", "problem")
    assert easy.cause == (
        "the reward is earned without the right answer: see rewarded_copies, "
        "rewarded_without_answer"
    )
    assert "let the reward refuse such completions" in easy.remedy
    learned = found(sums(*[("{sum}", 1.0), ("It is {sum}", 1.0)] * 4), MATH, metrics)
    assert [each.cause for each in learned] == [
        "the model has learned what these problems can teach"
    ]


def test_held_out_rewards_that_rise_do_not_silence_them() -> None:
    evaluations = {"eval/reward": [0.15, 0.8], "eval/reward_low": [0.1, 0.7]}
    evaluations["eval/reward_high"] = [0.2, 0.9]
    run = facts(evaluations, MATH, newest=step(sums(*[("{a} + {b}", 1.0)] * 8)))
    assert run.learned
    assert [each.code for each in diagnose(run)] == [COPIES, LACKS]


@pytest.mark.parametrize(
    "text",
    [
        *("8 + 9 = ", "<answer>", "\\boxed{", "1,111", "111 111 ", "#### ", "a\n", "</", "e\u0301"),
        *("**", "\\frac{1}{2} ", "twenty ", ".1", "漢字", "=\n", "1.1.1"),
    ],
)
def test_huge_texts_are_read_in_no_time(text: str) -> None:
    """24 prompts and 192 completions of 1 MB each, rewarded all: what is quadratic in the length of
    a text takes minutes."""
    huge = text * (1_000_000 // len(text))
    problems = [(huge, {"answer": "17", "choices": [huge]}, [(huge, 1.0)] * 8)] * 24
    run = RunSnapshot(job=MATH, newest=step(problems))
    start = time.process_time()
    hacks = [*reward_hacking.reward_hacks(run)]
    assert time.process_time() - start < 10.0
    assert all(len(each.text) < 400 for finding in hacks for each in finding.evidence)
