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
from collections.abc import Callable, Iterator, Mapping, Sequence
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

PLAIN_NUMBER_GRADERS = {"math": "answer"}
"""Graders that look for the row's answer in the text, and the param that names its column. Others
run the text, as `python_value` does, so that an expression is a right answer; or, as a job's own
code, may take the column for anything, such as the index of a choice."""

SIGNS = str.maketrans("×÷−–—", "*/---")
OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
_TRAILING_ZEROS = re.compile(r"(?<=\d)\.0+$")
_MARKUP = re.compile(r"</?\w{1,20}>|\*\*|__|[-=]>")
_FINAL = re.compile(r"\\boxed ?\{([^{}]*)\}|<answer>([^<]*)<|####([^\n]*)")
_IDEOGRAPHS = "\u2e80-\u9fff\uac00-\ud7af"
_TOKEN = re.compile(
    rf"[{_IDEOGRAPHS}]|\d+(?:[.,]\d+)*|[^\W\d{_IDEOGRAPHS}]+|[^\w\s.,;:!?'\"()$#`~…“”‘’]"
)

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

_ONES = _WORD.findall(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = _WORD.findall("twenty thirty forty fifty sixty seventy eighty ninety")


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
    answers = _answer_columns(job)
    is_sure = any(answers & prompt.row.keys() for prompt in batch.prompts)

    def is_copy_of(prompt: Prompt) -> Callable[[str], bool]:
        return CopySource.of(prompt, job, answers).is_copied_by

    yield from _found("rewarded_copies", batch, rewards_PG, least, is_copy_of, is_sure)


def _missing_answers(run: RunSnapshot) -> Iterator[Finding]:
    """Yields graders of text that reward completions without the number that is the row's
    answer."""
    batch = run.newest
    for reward in run.job.rewards if batch else ():
        key = PLAIN_NUMBER_GRADERS.get(reward.grader)
        if batch is None or key is None or reward.weight <= 0:
            continue
        column = str(reward.params.get(key, key))

        def lacks_answer_of(prompt: Prompt, column: str = column) -> Callable[[str], bool] | None:
            wanted = plain_number(prompt.row.get(column))
            if wanted is None or has_number(_question(prompt)[:PROMPT_CHARS], wanted):
                return None  # of a number that the problem names a formula may be the task
            return lambda text: not has_number(_ends(text), wanted)

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
    # spellings of a right answer that are not known here are rarer than 30 %; from 50 % on, most of
    # the gradient is the trick's
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


@dataclass(frozen=True)
class CopySource:
    """A prompt that may have been copied. `question` are the tokens of its last message.
    `answer_size`: how many tokens its right answer has, if it contains that, else 0. `choices` are
    runs that are right as a whole, as far as is known."""

    question: Sequence[str]
    answer_size: int
    choices: set[str]
    are_terms_free: bool

    @classmethod
    def of(cls, prompt: Prompt, job: Job, answer_columns: frozenset[str]) -> CopySource:
        question = _tokens(_question(prompt)[:PROMPT_CHARS])
        own = {*PROBLEM_COLUMNS, *(job.data.columns.values() if job.data else ())}
        mentioned = _mentioned(job)
        answer_size, choices = 0, set[str]()
        for column, value in prompt.row.items():
            is_answer = column in answer_columns
            may_choose = column in mentioned or isinstance(value, list | tuple | dict)
            texts = itertools.islice(_texts(value), MAX_TEXTS if is_answer or may_choose else 0)
            for tokens in map(_tokens, texts):
                if is_answer and _run(tokens) in _run(question) and any(map(str.isalnum, tokens)):
                    answer_size = max(answer_size, len(tokens))
                if may_choose and (is_answer or column not in own):
                    choices.add(_run(_inner(tokens)))
        are_terms_free = any(reward.grader == "python_value" for reward in job.rewards)
        return cls(question, answer_size, choices, are_terms_free)

    def is_copied_by(self, text: str) -> bool:
        """Returns whether the answer in `text`, or each side of an equation, is nearly a part of
        the prompt, or its terms in another order, and no choice."""
        marked = _marked(text)
        answer = text[:COMPLETION_CHARS] if marked is None else marked
        parts = [_inner(_tokens(part)) for part in re.split(r"[=\n]", answer)]
        sides = [part for part in parts if part]
        return self._is_copy(_inner(_tokens(answer))) or (
            len(sides) > 1 and not self.answer_size and all(map(self._is_copy, sides))
        )

    def _is_copy(self, tokens: Sequence[str]) -> bool:
        least, run = MIN_TOKENS, _run(self.question)
        if self.answer_size:  # then only nearly all of the prompt is a copy
            least = max(self.answer_size + MIN_TOKENS, math.ceil(0.75 * len(self.question)))
        new = {*tokens[:200]} - {*self.question}
        has_new_number = any(token[0].isdigit() for token in new)
        if len(tokens) < least or has_new_number or _run(tokens) in self.choices:
            return False
        is_expression = not self.are_terms_free and not {*"+-*/^"}.isdisjoint(tokens)
        return _run(tokens) in run or (
            is_expression and (self._has_beside_words(tokens) or self._has_in_another_order(tokens))
        )

    def _has_beside_words(self, tokens: Sequence[str]) -> bool:
        """Returns whether the tokens without the words at their ends are an expression of the
        prompt: "Sure! 8 + 9". Beside other texts the words matter: to fix a sentence is a task."""
        inner = [
            index
            for index, token in enumerate(tokens)
            if not (len(token) > 1 and token.isalpha()) and token not in ("i", "a")
        ]
        term = tokens[inner[0] : inner[-1] + 1] if inner else ()
        is_long = len(term) >= max(MIN_TOKENS, 0.6 * len(tokens))
        return is_long and _run(term) in _run(self.question)

    def _has_in_another_order(self, terms: Sequence[str]) -> bool:
        """Returns whether as many tokens of the prompt in a row, up to 8, are these."""
        size, wanted = len(terms), Counter(terms)
        windows = range(len(self.question) - size + 1 if size <= 8 else 0)
        return any(Counter(self.question[start : start + size]) == wanted for start in windows)


def _answer_columns(job: Job) -> frozenset[str]:
    """Returns the columns that hold the right answer: the columns that the rewards name, or
    else those with usual names."""
    params = {
        value
        for reward in job.rewards
        for value in reward.params.values()
        if isinstance(value, str)
    }
    usual = {PLAIN_NUMBER_GRADERS.get(reward.grader, "") for reward in job.rewards}
    return frozenset(params | ((_mentioned(job) | usual) & ANSWER_COLUMNS)) or ANSWER_COLUMNS


def _mentioned(job: Job) -> frozenset[str]:
    """Returns the words in the params and the code of the job's rewards: among them are the columns
    that they look at."""
    texts = [text for reward in job.rewards for text in _texts(reward.params)]
    texts += [reward.source or "" for reward in job.rewards]
    return frozenset(_WORD.findall(" ".join(text[:PROMPT_CHARS] for text in texts)))


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
    found = _TOKEN.findall(_MARKUP.sub(" ", text).translate(SIGNS).casefold())
    return [OPERATORS.get(token, _TRAILING_ZEROS.sub("", token)) for token in found]


def _run(tokens: Sequence[str]) -> str:
    """Returns tokens as a text that stands in another such text where they do."""
    return f" {' '.join(tokens)} " if tokens else ""


def _inner(tokens: Sequence[str]) -> Sequence[str]:
    """Returns the tokens without the words and signs around an answer: of "The answer is 8 + 9 ="
    8 + 9."""
    inner = [index for index, token in enumerate(tokens) if not FRAME.fullmatch(token)]
    return tokens[inner[0] : inner[-1] + 1] if inner else ()


# --- numbers -------------------------------------------------------------------------------------


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
    forms = [wanted, 100 * wanted] if "%" in text or "percent" in text else [wanted]
    return bool(_SCALED.search(text)) or any(
        math.isclose(value, form, rel_tol=1e-5)
        for value in itertools.chain(_numbers(text), _spoken(text))
        for form in forms
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
    words = re.findall(r"[a-z]+", text)
    for word, after in itertools.zip_longest(words, words[1:]):
        if word in _ONES:
            yield _ONES.index(word)
        elif word in _TENS:
            tens = 10 * _TENS.index(word) + 20
            yield tens
            yield tens + (_ONES.index(after) if after in _ONES[:10] else 0)
