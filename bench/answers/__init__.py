r"""Pairs of a row's answer and a completion, right or wrong by construction: 20 of each kind of
answers, always the same ones.

The answers are laid out as in GSM8K (the rows of its test set are in tests/data), MATH, AIME and
sets of science questions. A kind makes an answer of random numbers, ways to write it that are
right, and near misses: what differs in a sign, a digit, a unit, a name, an order or a bracket, says
more than the answer, or says nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.answers import everyday as _everyday
from bench.answers import formulas as _formulas
from bench.answers import numbers as _numbers
from bench.answers import words as _words
from bench.answers import written as _written
from bench.answers.made import kinds

PAIRS_OF_A_KIND = 20
MODULES = (_everyday, _formulas, _numbers, _words, _written)
"""They have the kinds."""


@dataclass(frozen=True)
class Pair:
    kind: str
    wanted: str
    completion: str
    is_right: bool


def pairs() -> Iterator[Pair]:
    """Yields all pairs."""
    for name, make in kinds.items():
        rng = random.Random(name)
        num = 0
        while num < PAIRS_OF_A_KIND:
            wanted, right, wrong = make(rng)
            candidates = [(text, True) for text in right] + [(text, False) for text in wrong]
            rng.shuffle(candidates)
            for text, is_right in candidates[: PAIRS_OF_A_KIND - num]:
                yield Pair(name, wanted, _completion(rng, text), is_right)
                num += 1


def _completion(rng: random.Random, answer: str) -> str:
    layouts = [r"\boxed{%s}", r"So the answer is $\boxed{%s}$.", r"\[\boxed{%s}\]", "#### %s"]
    return rng.choice(layouts) % answer
