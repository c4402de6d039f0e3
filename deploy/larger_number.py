"""Makes the problems of `make demo` and fetches its model:
`python -m deploy.larger_number --out DIR`.

A problem is two numbers from 10 to 99: "Which number is larger, 84 or 74?". SmolLM2-135M-Instruct
understands the question but rarely answers it: it explains, and often takes the wrong number.
Train and test share no pair of numbers, in either order, and the larger number is as often the
first as the second, so no position is an answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
from pathlib import Path

from deploy.machine import exit_on_signals
from deploy.real_model import fetch
from shared.errors import HoneError

MIN_NUMBER, MAX_NUMBER = 10, 99
NUM_TRAIN, NUM_TEST = 1600, 64

Problem = dict[str, str | int]


def make_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Returns train and test problems, in random order."""
    rng = random.Random(seed)
    pairs = list(itertools.combinations(range(MIN_NUMBER, MAX_NUMBER + 1), 2))
    drawn = rng.sample(pairs, NUM_TRAIN + NUM_TEST)
    problems = [
        _problem(*(pair if position % 2 else reversed(pair))) for position, pair in enumerate(drawn)
    ]
    train, test = problems[:NUM_TRAIN], problems[NUM_TRAIN:]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def _problem(first: int, second: int) -> Problem:
    question = f"Which number is larger, {first} or {second}?"
    return {"question": question, "answer": max(first, second)}


def main() -> None:
    exit_on_signals(signal.SIGTERM)
    parser = argparse.ArgumentParser(prog="python -m deploy.larger_number", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the problems")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (default: 0)")
    arguments = parser.parse_args()
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in zip(("train", "test"), make_problems(arguments.seed), strict=True):
        lines = (json.dumps(problem) + "\n" for problem in problems)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    try:
        fetch()
    except HoneError as error:
        sys.exit(f"model: {error.detail}")


if __name__ == "__main__":
    main()
