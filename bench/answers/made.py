"""What a kind of answers is, and what kinds are made of."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from math import gcd
from pathlib import Path

GSM8K = Path(__file__).parents[2] / "tests" / "data" / "gsm8k" / "test.jsonl.gz"

Made = tuple[str, list[str], list[str]]
"""A row's answer, and answers that are right and wrong by it."""

kinds: dict[str, Callable[[random.Random], Made]] = {}


def kind(make: Callable[[random.Random], Made]) -> Callable[[random.Random], Made]:
    kinds[make.__name__.replace("_", " ")] = make
    return make


def two(rng: random.Random, low: int = 2, high: int = 99) -> tuple[int, int]:
    """Returns two different numbers, the smaller first."""
    first, second = sorted(rng.sample(range(low, high), 2))
    return first, second


def lowest(above: int, below: int) -> tuple[int, int]:
    """Returns the terms of a fraction in its lowest terms."""
    divisor = gcd(above, below)
    return above // divisor, below // divisor


def _rows() -> list[int]:
    lines = gzip.decompress(GSM8K.read_bytes()).splitlines()
    answers = [json.loads(line)["answer"].rpartition("####")[2] for line in lines]
    return [int(answer.replace(",", "")) for answer in answers]


_ROWS = _rows()


def row(rng: random.Random) -> int:
    """Returns the answer of a row of GSM8K's test set."""
    return rng.choice(_ROWS)
