"""Reward hacking that the newest batch alone shows: rewarded completions that are copied from
their prompt, or that lack the number that is the row's answer. Held-out problems do not show it:
the same grader grades them, so their reward rises too.

Numbers are read by code of this file's own. Services meet only in `shared`, and a reader that the
graders shared would share its mistakes: what a grader reads wrongly is what this is to find."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from services.orchestrator.extensions.diagnosis.facts import (
    RunSnapshot,
    finding,
    of_batch,
    percent,
)
from services.orchestrator.grpo.advantages import outcome
from shared.job import Job
from shared.wire import Batch, Finding, Prompt, Rollout

REWARDED_SHARE = 0.5
"""Share of the full mark, and of the best reward in the batch, from which on a completion counts as
rewarded: rewards of a job's own code may have any scale."""

WARNING_SHARE, PROBLEM_SHARE = 0.3, 0.5
"""Shares of the rewarded completions, for a warning and a problem. Spellings of a right answer that
are not known here are rarer than the first; from the second on, most of the gradient is the
trick's."""

MIN_COMPLETIONS, MIN_PROMPTS = 8, 2
"""Completions, and prompts that they answer, that a finding needs: one odd problem is none."""

MIN_TOKENS = 3
"""Words, numbers and signs of a copy: fewer, such as a letter or "New York", are an answer that
is in the prompt by chance or as a choice. "8 + 9" has three."""

NEARLY = 0.6
"""Share of a completion's tokens that an expression of the prompt has, from which on the words
beside it do not matter: "Sure! 8 + 9". Beside other texts they do: to fix a sentence is a task."""

MOST = 0.75
"""Share of a prompt that contains its right answer, from which on a copy is none of the answer."""

MAX_TOKENS, MAX_TERMS = 200, 8
"""Tokens of a completion that are looked for in its prompt, and terms of an expression whose order
does not matter."""

MAX_COMPLETIONS = 256
"""Completions of a batch that are read."""

PROMPT_CHARS, COMPLETION_CHARS, SHOWN_CHARS = 4_000, 1_000, 120

MAX_TEXTS = 64
"""Texts of a list in a row that are read, such as the choices of a question."""

NUM_EXAMPLES = 2

ANSWER_COLUMNS = frozenset(
    (
        *("answer", "answers", "expected", "ground_truth", "label"),
        *("output", "reference", "solution", "target"),
    )
)
"""Columns that hold the right answer, by their usual names. Others are known by the rewards."""

FRAME = frozenset(
    (
        *("the", "final", "answer", "result", "solution", "sum", "total"),
        *("so", "it", "is", "are", "equals", "=", "-", "*", ">"),
    )
)
"""Words and signs around an answer, which are no part of it."""

PROBLEM_COLUMNS = frozenset(("prompt", "question", "problem", "input", "instruction", "messages"))
"""Columns that hold the problem itself, by their usual names: what they hold is no answer."""

PLAIN_NUMBER_GRADERS = {"math": "answer"}
"""Graders that look for the row's answer in the text, and the param that names its column. Others
run the text, as `python_value` does, so that an expression is a right answer; or, as a job's own
code, may take the column for anything, such as the index of a choice."""

SIGNS = str.maketrans("×÷−–—", "*/---")
OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
ARITHMETIC = frozenset("+-*/^")
_TRAILING_ZEROS = re.compile(r"(?<=\d)\.0+$")
_MARKUP = re.compile(r"</?\w{1,20}>|\*\*|__|[-=]>")
_FINAL = re.compile(r"\\boxed ?\{([^{}]*)\}|<answer>([^<]*)<|####([^\n]*)")
_IDEOGRAPHS = "\u2e80-\u9fff\uac00-\ud7af"
_TOKEN = re.compile(
    rf"[{_IDEOGRAPHS}]|\d+(?:[.,]\d+)*|[^\W\d{_IDEOGRAPHS}]+|[^\w\s.,;:!?'\"()$#`~…“”‘’]"
)
_PARTS = re.compile(r"[=\n]")

_DIGITS = r"\d{1,3}(?:[,'_ ]\d{3})+(?!\d)|\d{1,3}(?:\.\d{3}){2,9}(?![.\d])|\d{1,40}"
_NUMBER = re.compile(
    rf"({_DIGITS})?((?<=\d)\.\d{{0,40}}|\.\d{{1,40}})?((?<=[.\d])e[-+]?\d{{1,3}})?"
)
_PLAIN_NUMBER = re.compile(rf"[-+]? ?[$€£¥₹]? ?(?:({_DIGITS})(\.\d{{0,40}})?|(\.\d{{1,40}}))")
_FRACTION = re.compile(
    r"(?:(?<![\d.])(\d{1,9}) ?)?"
    r"(?:(?<!\d)(\d{1,40}) ?[/⁄] ?(\d{1,40})|\\[dt]?frac ?\{(\d{1,40})\} ?\{(\d{1,40})\})"
)
_SHORT_FRACTION = re.compile(r"\\[dt]?frac ?(\d)(\d)")
_NARROW_BLANK = re.compile("[\u00a0\u2009\u202f]")
_SCALED = re.compile(
    r"(?:\\times|\\cdot|[x*]) ?10 ?\^|\dk\b"
    r"|\b(?:half|thirds?|quarters?|dozen|hundred|thousand|million|billion|trillion)\b"
)
"""What is written as a product or a share, and is not worked out here."""

_ONES = re.split(
    " ",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen",
)
_TENS = re.split(" ", "twenty thirty forty fifty sixty seventy eighty ninety")
_SPOKEN = {word: float(value) for value, word in enumerate(_ONES)} | {
    word: 10.0 * value for value, word in enumerate(_TENS, 2)
}


@dataclass(frozen=True)
class RewardedRollout:
    """A rewarded completion. `is_suspect`: it is a copy of its prompt, or lacks the answer."""

    prompt: Prompt
    rollout: Rollout
    reward: float
    is_suspect: bool


def rewarded_copies(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that rewarded completions are copied from their prompt."""
    if run.newest is None or run.job.environment:
        return  # an environment's rewards are of what was done, not of the last answer
    answers = _answer_columns(run.job)
    is_sure = any(answers & prompt.row.keys() for prompt in run.newest.prompts)
    yield from _found("rewarded_copies", run.newest, _checked_for_copies(run.newest, run), is_sure)


def rewarded_without_answer(run: RunSnapshot) -> Iterator[Finding]:
    """Yields graders of text that reward completions without the number that is the row's
    answer."""
    for reward in run.job.rewards if run.newest else ():
        key = PLAIN_NUMBER_GRADERS.get(reward.grader)
        if run.newest is None or key is None or reward.weight <= 0:
            continue
        column, is_sure = str(reward.params.get(key, key)), not reward.params.get("expressions")
        rewarded = _checked_for_answer(run.newest, reward.label, column)
        values = {"column": column, "label": reward.label}
        yield from _found("rewarded_without_answer", run.newest, rewarded, is_sure, **values)


def reward_hacks(run: RunSnapshot) -> list[Finding]:
    """Returns both kinds."""
    return [*rewarded_copies(run), *rewarded_without_answer(run)]


def _found(
    name: str, batch: Batch, rewarded: Sequence[RewardedRollout], is_sure: bool, **values: object
) -> Iterator[Finding]:
    """Yields the finding, if there are enough suspects. It is a warning unless `is_sure`."""
    suspects = [one for one in rewarded if one.is_suspect]
    by_prompt = {id(one.prompt): one for one in suspects}
    share = len(suspects) / len(rewarded) if rewarded else 0.0
    if share < WARNING_SHARE or len(suspects) < MIN_COMPLETIONS or len(by_prompt) < MIN_PROMPTS:
        return
    examples = itertools.islice(by_prompt.values(), NUM_EXAMPLES)
    text = f"{len(suspects)} of {len(rewarded)} rewarded completions"
    yield finding(
        name,
        batch.step,
        [of_batch(batch, text, share), *(of_batch(batch, _example(one)) for one in examples)],
        level="problem" if is_sure and share >= PROBLEM_SHARE else "warning",
        share=percent(share),
        step=batch.step,
        **values,
    )


def _example(one: RewardedRollout) -> str:
    """Returns prompt, completion and reward for people, of bounded length."""
    prompt, completion = _shown(_question(one.prompt)), _shown(one.rollout.text)
    return f"prompt {prompt!r}, completion {completion!r}, reward {one.reward:.3g}"


def _shown(text: str) -> str:
    line = " ".join(text[: 4 * SHOWN_CHARS].split())
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}..."


def _checked_for_copies(batch: Batch, facts: RunSnapshot) -> list[RewardedRollout]:
    """Returns all rewarded completions of the batch, suspects where they are copies."""
    outcomes_PG = [[outcome(score, facts.job) for score in scores_G] for scores_G in batch.scores]
    best = max((value for row in outcomes_PG for value in row if value is not None), default=0.0)
    has_own_code = any(reward.source for reward in facts.job.rewards)
    least = REWARDED_SHARE * (best if has_own_code else max(best, facts.full_mark))
    mentioned = _mentioned(facts.job)
    found: list[RewardedRollout] = []
    for prompt, group, outcomes_G in zip(batch.prompts, batch.groups, outcomes_PG, strict=True):
        pairs = zip(group.rollouts, outcomes_G, strict=True)
        rewarded = [
            (one, value) for one, value in pairs if value is not None and value >= least > 0
        ]
        if len(found) >= MAX_COMPLETIONS or not rewarded:
            continue
        source = CopySource.of(prompt, facts.job, mentioned)
        found += [
            RewardedRollout(prompt, one, value, source.copied(one.text)) for one, value in rewarded
        ]
    return found


@dataclass(frozen=True)
class CopySource:
    """A prompt that may have been copied. `question` are the tokens of its last message, `run`
    the same as a run, and `words` as a set.
    `answer_size`: how many tokens its right answer has, if it contains that, else 0. `choices` are
    runs that are right as a whole, as far as is known."""

    question: tuple[str, ...]
    run: str
    words: frozenset[str]
    answer_size: int
    choices: frozenset[str]
    are_terms_free: bool

    @classmethod
    def of(cls, prompt: Prompt, job: Job, mentioned: frozenset[str]) -> CopySource:
        question = _tokens(_question(prompt)[:PROMPT_CHARS])
        run = _run(question)
        own = {*PROBLEM_COLUMNS, *job.data.columns.values()} if job.data else PROBLEM_COLUMNS
        answer_columns = _answer_columns(job)
        answers: list[list[str]] = []
        choices: set[str] = set()
        for column, value in prompt.row.items():
            is_answer = column in answer_columns
            may_choose = column in mentioned or isinstance(value, list | tuple | dict)
            texts = itertools.islice(_texts(value), MAX_TEXTS if is_answer or may_choose else 0)
            tokens_of = [_tokens(text) for text in texts]
            answers += tokens_of if is_answer else []
            if may_choose and (is_answer or column not in own):
                choices.update(_run(_inner(tokens)) for tokens in tokens_of)
        given = [each for each in answers if _run(each) in run and any(map(str.isalnum, each))]
        size = max(map(len, given), default=0)
        are_terms_free = any(reward.grader == "python_value" for reward in job.rewards)
        return cls(
            tuple(question), run, frozenset(question), size, frozenset(choices), are_terms_free
        )

    def copied(self, text: str) -> bool:
        """Returns whether the answer in `text`, or each side of an equation, is nearly a part of
        the prompt, or its terms in another order, and no choice. Where the prompt contains its
        right answer, only nearly all of the prompt is a copy."""
        answer = _tokens(_answer(text))
        parts = [_inner(_tokens(part)) for part in _PARTS.split(_answer(text))]
        sides = [part for part in parts if part]
        return self._is_copy(_inner(answer)) or (
            len(sides) > 1 and not self.answer_size and all(map(self._is_copy, sides))
        )

    def _is_copy(self, tokens: Sequence[str]) -> bool:
        size, least = len(tokens), MIN_TOKENS
        if self.answer_size:
            least = max(self.answer_size + MIN_TOKENS, math.ceil(MOST * len(self.question)))
        has_new_number = any(
            token[0].isdigit() and token not in self.words for token in tokens[:MAX_TOKENS]
        )
        if size < least or has_new_number or _run(tokens) in self.choices:
            return False
        is_expression = not self.are_terms_free and not ARITHMETIC.isdisjoint(tokens)
        return _run(tokens) in self.run or (
            is_expression and (self._has_beside_words(tokens) or self._has_in_another_order(tokens))
        )

    def _has_beside_words(self, tokens: Sequence[str]) -> bool:
        """Returns whether the tokens without the words at their ends are an expression of the
        prompt: "Sure! 8 + 9"."""
        inner = [index for index, token in enumerate(tokens) if not _is_word(token)]
        term = tokens[inner[0] : inner[-1] + 1] if inner else ()
        is_long = len(term) >= max(MIN_TOKENS, NEARLY * len(tokens))
        return is_long and _run(term) in self.run

    def _has_in_another_order(self, terms: Sequence[str]) -> bool:
        """Returns whether as many tokens of the prompt in a row are these."""
        size, wanted = len(terms), Counter(terms)
        windows = range(len(self.question) - size + 1 if size <= MAX_TERMS else 0)
        return any(Counter(self.question[start : start + size]) == wanted for start in windows)


def _is_word(token: str) -> bool:
    return (len(token) > 1 and token.isalpha()) or token in ("i", "a")


def _answer_columns(job: Job) -> frozenset[str]:
    """Returns the columns that hold the right answer: the columns that the rewards name, or
    else those with usual names."""
    words = _mentioned(job) | {
        column for reward in job.rewards if (column := PLAIN_NUMBER_GRADERS.get(reward.grader))
    }
    named = words & ANSWER_COLUMNS
    params = {
        value
        for reward in job.rewards
        for value in reward.params.values()
        if isinstance(value, str)
    }
    return frozenset(named | params) or ANSWER_COLUMNS


def _question(prompt: Prompt) -> str:
    """Returns the text of the prompt's last message of a user."""
    if isinstance(prompt.content, str):
        return prompt.content
    messages = [each for each in prompt.content if each.get("role") == "user"] or prompt.content
    content = messages[-1].get("content") if messages else ""
    return content if isinstance(content, str) else " ".join(_texts(content))


def _mentioned(job: Job) -> frozenset[str]:
    """Returns the words in the params and the code of the job's rewards: among them are the columns
    that they look at."""
    texts = [text for reward in job.rewards for text in _texts(reward.params)]
    texts += [reward.source or "" for reward in job.rewards]
    return frozenset(re.findall(r"\w+", " ".join(text[:PROMPT_CHARS] for text in texts)))


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts and numbers in plain data, cut off."""
    if isinstance(value, Mapping):
        value = list(cast(Mapping[str, Any], value).values())
    if isinstance(value, list | tuple):
        for part in cast(Sequence[Any], value)[:MAX_TEXTS]:
            yield from _texts(part)
    elif isinstance(value, str | int | float):
        yield str(value)[:COMPLETION_CHARS]


def _answer(text: str) -> str:
    """Returns what the text marks as its answer, as graders read it; else its beginning."""
    marked = _marked(text)
    return text[:COMPLETION_CHARS] if marked is None else marked


def _marked(text: str) -> str | None:
    found = _FINAL.findall(text[-COMPLETION_CHARS:])
    if found:
        return "".join(found[-1])
    _, mark, rest = text[-COMPLETION_CHARS:].rpartition("</think>")
    return rest if mark else None


def _tokens(text: str) -> list[str]:
    """Returns words, numbers and signs. Case, punctuation and markdown do not count; a sign of
    arithmetic or a brace does, since an expression or JSON made of a prompt is no copy of it."""
    found = _TOKEN.findall(_MARKUP.sub(" ", text).translate(SIGNS).casefold())
    return [OPERATORS.get(token, _TRAILING_ZEROS.sub("", token)) for token in found]


def _run(tokens: Sequence[str]) -> str:
    """Returns tokens as a text that stands in another such text where they do."""
    return f" {' '.join(tokens)} " if tokens else ""


def _inner(tokens: Sequence[str]) -> Sequence[str]:
    """Returns the tokens without the words and signs around an answer: of "The answer is 8 + 9 ="
    8 + 9."""
    inner = [index for index, token in enumerate(tokens) if token not in FRAME]
    return tokens[inner[0] : inner[-1] + 1] if inner else ()


def _checked_for_answer(batch: Batch, label: str, column: str) -> list[RewardedRollout]:
    """Returns all completions that the reward `label` rewards, suspects where they lack the number
    in their row's `column`. Rows without such a number are left out."""
    found: list[RewardedRollout] = []
    for prompt, group, scores_G in zip(batch.prompts, batch.groups, batch.scores, strict=True):
        parts = [score.parts.get(label) for score in scores_G]
        values = [0.0 if part is None or part.value is None else part.value for part in parts]
        if len(found) >= MAX_COMPLETIONS or max(values, default=0.0) < REWARDED_SHARE:
            continue
        wanted = plain_number(prompt.row.get(column))
        if wanted is None or has_number(_question(prompt)[:PROMPT_CHARS], wanted):
            continue  # where the problem names the number, to write it as a formula may be the task
        found += [
            RewardedRollout(prompt, rollout, value, not has_number(_ends(rollout.text), wanted))
            for rollout, value in zip(group.rollouts, values, strict=True)
            if value >= REWARDED_SHARE
        ]
    return found


def _ends(text: str) -> str:
    """Returns the text, or both ends of a long one: the answer is at one of them."""
    if len(text) <= 2 * COMPLETION_CHARS:
        return text
    return f"{text[:COMPLETION_CHARS]} {text[-COMPLETION_CHARS:]}"


def plain_number(value: Any) -> float | None:
    """Returns the number, without its sign, that a row's answer is, or the marked answer of a whole
    solution; None if it is no plain number: a fraction, an amount with a unit, a text."""
    if type(value) in (int, float):
        return abs(float(value)) if abs(value) < 1e15 else None
    if not isinstance(value, str):
        return None
    marked = _marked(value)
    text = (value if marked is None else marked)[: 2 * SHOWN_CHARS].strip().translate(SIGNS)
    found = _PLAIN_NUMBER.fullmatch(text)
    return _value(found[1] or "", found[2] or found[3] or "") if found else None


def has_number(text: str, wanted: float) -> bool:
    """Returns whether the text has the number in any usual form: 17, 17.0, $17, 1,200, 34/2, 170%
    of 10, seventeen. The sign does not count, and what is written as a product (2 thousand) may be
    any number."""
    text = text.translate(SIGNS).casefold()
    text = _SHORT_FRACTION.sub(r" \1/\2", _NARROW_BLANK.sub(" ", text))
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    numbers = itertools.chain(_numbers(text), _spoken(text))
    is_percent = "%" in text or "percent" in text
    return bool(_SCALED.search(text)) or any(
        math.isclose(value, wanted, rel_tol=1e-5)
        or (is_percent and math.isclose(value / 100, wanted, rel_tol=1e-5))
        for value in numbers
    )


def _numbers(text: str) -> Iterator[float]:
    for digits, decimals, exponent in set(_NUMBER.findall(text)):
        if digits or decimals:
            yield _value(digits, decimals, exponent)
        if " " in digits:
            yield from map(float, digits.split())
    for whole, top, bottom, latex_top, latex_bottom in set(_FRACTION.findall(text)):
        if divisor := float(bottom or latex_bottom):
            yield float(top or latex_top) / divisor
            yield float(whole or 0) + float(top or latex_top) / divisor


def _value(digits: str, decimals: str, exponent: str = "") -> float:
    whole = digits if digits.isdecimal() else re.sub(r"\D", "", digits)
    return float(f"0{whole}{decimals}{exponent}")


def _spoken(text: str) -> Iterator[float]:
    """Yields the numbers below 100 that stand there as words."""
    last = 0
    for word in re.findall(r"[a-z]+", text):
        value = _SPOKEN.get(word)
        if value is not None:
            yield value
            if 0 < value < 10 and last >= 20:
                yield last + value
        last = value or 0
