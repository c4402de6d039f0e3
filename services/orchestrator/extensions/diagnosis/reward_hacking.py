"""Reward hacking that the newest batch alone shows: rewarded completions that are copied from
their prompt, or that are an expression in place of the number that is the row's answer. Held-out
problems do not show it: the same grader grades them, so their reward rises too.

Numbers are read by code of this file's own. Services meet only in `shared`, and a reader that the
graders shared would share its mistakes: what a grader reads wrongly is what this is to find."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from services.orchestrator.extensions.diagnosis.facts import (
    RunSnapshot,
    finding,
    of_batch,
    percent,
)
from services.orchestrator.grpo.advantages import outcome
from shared.job import Job
from shared.wire import Batch, Finding, Prompt

REWARDED_SHARE = 0.5
"""Share of the full mark, and of the best reward in the batch, from which on a completion counts as
rewarded: rewards of a job's own code may have any scale."""

MIN_TOKENS = 3
"""Words, numbers and signs of a copy: fewer, such as a letter or "New York", are an answer that
is in the prompt by chance or as a choice. "8 + 9" has three."""

MAX_COMPLETIONS, MAX_TEXTS = 256, 64
"""Completions of a batch that are read, and texts of a list in a row, such as the choices of a
question."""

PROMPT_CHARS, COMPLETION_CHARS, SHOWN_CHARS = 4_000, 1_000, 120

_WORD = re.compile(r"\w+")

ANSWER_COLUMNS = frozenset(
    _WORD.findall("answer answers expected ground_truth label output reference solution target")
)
"""Columns that hold the right answer, by their usual names. Others are known by the rewards."""

PROBLEM_COLUMNS = frozenset(("prompt", "question", "problem", "input", "instruction", "messages"))
"""Columns that hold the problem itself, by their usual names: what they hold is no answer."""

FRAME = re.compile("the|final|answer|result|solution|sum|total|so|it|is|are|equals|[-=*>]")
"""Words and signs around an answer, which are no part of it."""

SIGNS = str.maketrans("×÷−–—", "*/---")
_FINAL = re.compile(r"\\boxed ?\{([^{}]*)\}|<answer>([^<]*)<|####([^\n]*)")
_MARKUP = re.compile(r"</?\w{1,20}>|\*\*|__|[-=]>")
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d]+|[^\w\s.,;:!?'\"()$#`~…“”‘’]")

_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"\d{1,40}(?:\.\d{1,40})?|\.\d{1,40}")
_EXPRESSION = re.compile(r"[\d)}] ?(?:[-+*^]|\\times|\\cdot) ?[\d({]")
_OTHER_FORM = re.compile(r"\d ?/ ?\d|frac|10 ?\^|\d ?%")
"""Numbers that are not worked out here: fractions, powers of ten, percentages."""


def reward_hacks(run: RunSnapshot) -> Iterator[Finding]:
    """Yields what is found of either kind."""
    yield from _copies(run)
    yield from _missing_answers(run)


def _copies(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that rewarded completions are copied from their prompt."""
    batch, job = run.newest, run.job
    if batch is None or job.environment:
        return  # an environment's rewards are of what was done, not of the last answer
    rewards_PG = [[outcome(score, job) for score in scores_G] for scores_G in batch.scores]
    best = max((each for row in rewards_PG for each in row if each is not None), default=0.0)
    has_own_code = any(reward.source for reward in job.rewards)
    least = REWARDED_SHARE * (best if has_own_code else max(best, run.full_mark))
    named = _named_columns(job)
    is_sure = any(_answer_columns(prompt, named) for prompt in batch.prompts)

    def is_copy_of(prompt: Prompt) -> Callable[[str], bool]:
        return _copy_check(prompt, job, _answer_columns(prompt, named))

    yield from _found("rewarded_copies", batch, rewards_PG, least, is_copy_of, is_sure)


def _missing_answers(run: RunSnapshot) -> Iterator[Finding]:
    """Yields rewards of grader `math` for expressions without the number that is the row's answer.
    Other graders run the text, so that an expression is a right answer; or, as a job's own code,
    may take the column for anything, such as the index of a choice."""
    batch = run.newest
    for reward in run.job.rewards if batch else ():
        if batch is None or reward.grader != "math" or reward.weight <= 0:
            continue
        column = str(reward.params.get("answer", "answer"))

        def lacks_answer_of(prompt: Prompt, column: str = column) -> Callable[[str], bool] | None:
            wanted = plain_number(prompt.row.get(column))
            if wanted is None or not lacks_number(_question(prompt)[:PROMPT_CHARS], wanted):
                return None  # of a number that the problem names a formula may be the task
            return lambda text: is_expression_without(text, wanted)

        parts_PG = [[score.parts.get(reward.label) for score in row] for row in batch.scores]
        yield from _found(
            "rewarded_without_answer",
            batch,
            [[part and part.value for part in parts_G] for parts_G in parts_PG],
            REWARDED_SHARE,
            lacks_answer_of,
            not reward.params.get("expressions"),
            column=column,
            label=reward.label,
        )


def _found(
    name: str,
    batch: Batch,
    rewards_PG: Sequence[Sequence[float | None]],
    least: float,
    suspicion_of: Callable[[Prompt], Callable[[str], bool] | None],
    is_sure: bool,
    **values: object,
) -> Iterator[Finding]:
    """Yields the finding, if enough completions that earn `least` are suspects: at least 8, of two
    prompts, as one odd problem is none. It is a warning unless `is_sure`. `suspicion_of` gives what
    tells whether a completion of the prompt is a suspect; None: the prompt is left out."""
    num_rewarded, suspects = 0, list[tuple[Prompt, str, float]]()
    for prompt, group, rewards_G in zip(batch.prompts, batch.groups, rewards_PG, strict=True):
        rewarded = [
            (rollout.text, reward)
            for rollout, reward in zip(group.rollouts, rewards_G, strict=True)
            if reward is not None and reward >= least > 0
        ]
        if num_rewarded < MAX_COMPLETIONS and rewarded and (is_suspect := suspicion_of(prompt)):
            num_rewarded += len(rewarded)
            suspects += [(prompt, *each) for each in rewarded if is_suspect(each[0])]
    by_prompt = {id(one[0]): one for one in suspects}
    share = len(suspects) / num_rewarded if suspects else 0.0
    # fewer than 30 % may be right answers of a form not known here; from 50 % on, most of the
    # gradient is the trick's
    if share < 0.3 or len(suspects) < 8 or len(by_prompt) < 2:
        return
    examples = [
        f"prompt {_shown(_question(prompt))!r}, completion {_shown(text)!r}, reward {reward:.3g}"
        for prompt, text, reward in itertools.islice(by_prompt.values(), 2)
    ]
    text = f"{len(suspects)} of {num_rewarded} rewarded completions"
    yield finding(
        name,
        batch.step,
        [of_batch(batch, text, share), *(of_batch(batch, each) for each in examples)],
        level="problem" if is_sure and share >= 0.5 else "warning",
        share=percent(share),
        step=batch.step,
        **values,
    )


def _shown(text: str) -> str:
    line = " ".join(text[: 4 * SHOWN_CHARS].split())
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}..."


# --- copies --------------------------------------------------------------------------------------


def _copy_check(prompt: Prompt, job: Job, answer_columns: set[str]) -> Callable[[str], bool]:
    """Returns what tells whether a completion's answer is a part of the prompt's last message, and
    no answer or choice that the row has. Where the message contains the right answer, only most of
    the message is a copy of it."""
    question = _tokens(_question(prompt)[:PROMPT_CHARS])
    asked, least, right = _run(question), MIN_TOKENS, set[str]()
    problem = {*PROBLEM_COLUMNS, *(job.data.columns.values() if job.data else ())}
    for column, value in prompt.row.items():
        is_answer = column in answer_columns
        if not is_answer and (column in problem or isinstance(value, str | int | float)):
            continue
        for tokens in map(_tokens, itertools.islice(_texts(value), MAX_TEXTS)):
            right.add(_run(_inner(tokens)))
            if is_answer and _run(tokens) in asked and any(map(str.isalnum, tokens)):
                least = max(least, len(tokens) + MIN_TOKENS, math.ceil(0.75 * len(question)))

    def is_copy(text: str) -> bool:
        marked = _marked(text)
        answer = _inner(_tokens(text[:COMPLETION_CHARS] if marked is None else marked))
        return len(answer) >= least and _run(answer) in asked and _run(answer) not in right

    return is_copy


def _named_columns(job: Job) -> set[str]:
    """Returns the words in the params and the code of the job's rewards: among them are the columns
    that they look at. `answer` is the column of grader `math` by default."""
    texts = [text for reward in job.rewards for text in _texts(reward.params)]
    texts += [reward.source or "" for reward in job.rewards]
    return {"answer", *_WORD.findall(" ".join(text[:PROMPT_CHARS] for text in texts))}


def _answer_columns(prompt: Prompt, named: set[str]) -> set[str]:
    """Returns the columns that hold the right answer: the ones that the rewards name, or else those
    with usual names."""
    columns = set(prompt.row)
    return (columns & named) - PROBLEM_COLUMNS or columns & ANSWER_COLUMNS


def _question(prompt: Prompt) -> str:
    """Returns the text of the prompt's last message of a user."""
    if isinstance(prompt.content, str):
        return prompt.content
    messages = [each for each in prompt.content if each.get("role") == "user"] or prompt.content
    content = messages[-1].get("content") if messages else ""
    return content if isinstance(content, str) else " ".join(_texts(content))


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts and numbers in plain data, cut off."""
    if isinstance(value, Mapping):
        value = list(cast(Mapping[str, Any], value).values())
    if isinstance(value, list | tuple):
        for part in cast(Sequence[Any], value)[:MAX_TEXTS]:
            yield from _texts(part)
    elif isinstance(value, str | int | float):
        yield str(value)[:COMPLETION_CHARS]


def _marked(text: str) -> str | None:
    """Returns what the text marks as its answer, as graders read it."""
    found = _FINAL.findall(text[-COMPLETION_CHARS:])
    if found:
        return "".join(found[-1])
    _, mark, rest = text[-COMPLETION_CHARS:].rpartition("</think>")
    return rest if mark else None


def _tokens(text: str) -> list[str]:
    """Returns words, numbers and signs. Case, punctuation and markdown do not count; a sign of
    arithmetic or a brace does, since an expression or JSON made of a prompt is no copy of it."""
    return _TOKEN.findall(_MARKUP.sub(" ", text).translate(SIGNS).casefold())


def _run(tokens: Sequence[str]) -> str:
    """Returns tokens as a text that stands in another such text where they do."""
    return f" {' '.join(tokens)} " if tokens else ""


def _inner(tokens: Sequence[str]) -> Sequence[str]:
    """Returns the tokens without the words and signs around an answer: of "The answer is 8 + 9 ="
    8 + 9."""
    inner = [index for index, token in enumerate(tokens) if not FRAME.fullmatch(token)]
    return tokens[inner[0] : inner[-1] + 1] if inner else ()


# --- numbers -------------------------------------------------------------------------------------


def plain_number(value: Any) -> float | None:
    """Returns the number, without its sign, that a row's answer is, or the marked answer of a whole
    solution; None if it is no plain number: a fraction, an amount with a unit, a text."""
    text = str(value) if type(value) in (int, float, str) else ""
    marked = _marked(text)
    text = _THOUSANDS.sub("", (text if marked is None else marked)[:SHOWN_CHARS])
    found = _NUMBER.fullmatch(text.strip().lstrip("-+$ "))
    return float(found[0]) if found else None


def is_expression_without(text: str, wanted: float) -> bool:
    """Returns whether the text has an arithmetic expression, and the number nowhere: 8 + 9 for
    17."""
    if len(text) > 2 * COMPLETION_CHARS:  # the answer is at one of the ends
        text = f"{text[:COMPLETION_CHARS]} {text[-COMPLETION_CHARS:]}"
    text = text.translate(SIGNS)
    is_expression = _EXPRESSION.search(text) and not _OTHER_FORM.search(text)
    return bool(is_expression) and lacks_number(text, wanted)


def lacks_number(text: str, wanted: float) -> bool:
    """Returns whether the number is nowhere in the text: 17, 17.0, 1,200. The sign does not
    count."""
    found = _NUMBER.findall(_THOUSANDS.sub("", text))
    return not any(math.isclose(float(each), wanted, rel_tol=1e-5) for each in found)
