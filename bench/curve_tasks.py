"""The tasks of `bench.curves`: their problems, their settings, and the supervised steps before."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.curve_model import Warmup
from bench.trl_side import Recipe

NUM_HELD_OUT = 64

SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
# fmt: off
NAMES = [
    "Adam", "Anna", "Carl", "Daniel", "Emma", "Eva", "George", "Hannah", "Iris", "Jane", "Kate",
    "Leo", "Lucy", "Mark", "Mary", "Nora", "Paul", "Rosa", "Simon", "Thomas",
]
CITIES = [
    "Athens", "Berlin", "Boston", "Cairo", "Chicago", "Denver", "Dublin", "Geneva", "Hamburg",
    "Helsinki", "Istanbul", "Kyoto", "Lima", "Lisbon", "London", "Madrid", "Miami", "Milan",
    "Moscow", "Munich",
]
# fmt: on
SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name} lives in {city} and is {age} years old.",
    "In {city} lives {name}, who is {age}.",
)

Problem = tuple[str, str]
"""A question and its answer."""


def sum_of_two(rng: random.Random) -> Problem:
    one, other = rng.randint(1, 20), rng.randint(1, 20)
    return f"What is {one} + {other}?", str(one + other)


def spelled_word(rng: random.Random) -> Problem:
    """A word of three syllables without its last vowel, spelled, because the model's tokens are
    parts of words."""
    word = "".join(rng.choice(SYLLABLES) for _ in range(3))[:5]
    return " ".join(word), " ".join(reversed(word))


def person(rng: random.Random) -> Problem:
    facts = {
        "name": rng.choice(NAMES),
        "age": rng.randint(18, 80),
        "city": rng.choice(CITIES),
    }
    return rng.choice(SENTENCES).format(**facts), json.dumps(facts)


@dataclass(frozen=True)
class Task:
    """What the model learns. A prompt is the `system` message, `num_examples` worked examples that
    are the same for all rows, and a question of `problem`."""

    name: str
    system: str
    problem: Callable[[random.Random], Problem]
    recipe: Recipe
    steps: int
    warmup: Warmup
    num_examples: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """All that the weights before training depend on, as JSON has it."""
        return {
            "task": self.name,
            "system": self.system,
            "num_examples": self.num_examples,
            "warmup": asdict(self.warmup),
        }

    def run_settings(self, seed: int) -> dict[str, Any]:
        """Returns everything that a training run depends on, except the side."""
        recipe = asdict(replace(self.recipe, seed=seed))
        return self.settings | {"steps": self.steps, "recipe": recipe}

    def held_out(self) -> list[dict[str, Any]]:
        """Returns `NUM_HELD_OUT` different rows, the same for every seed."""
        return self._rows(random.Random(f"{self.name} held out"), NUM_HELD_OUT, distinct=True)

    def warmup_rows(self) -> list[dict[str, Any]]:
        count = self.warmup.steps * self.warmup.batch
        return self._rows(random.Random(f"{self.name} warm-up"), count)

    def train_rows(self, seed: int) -> list[dict[str, Any]]:
        """Returns the rows of all steps, in the order in which both sides take them."""
        count = self.steps * self.recipe.num_prompts
        return self._rows(random.Random(f"{self.name} {seed}"), count)

    def _rows(self, rng: random.Random, count: int, distinct: bool = False) -> list[dict[str, Any]]:
        """Returns `count` rows. No question of the held-out rows is among them, unless
        `distinct`."""
        taken = set[str]() if distinct else {question(row) for row in self.held_out()}
        shown = random.Random(f"{self.name} examples")
        examples: list[dict[str, str]] = []
        for _ in range(self.num_examples):
            user, answer = self.problem(shown)
            examples += [
                {"role": "user", "content": user},
                {"role": "assistant", "content": answer},
            ]
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            user, answer = self.problem(rng)
            if user in taken:
                continue
            if distinct:
                taken.add(user)
            messages = [
                {"role": "system", "content": self.system},
                *examples,
                {"role": "user", "content": user},
            ]
            rows.append({"prompt": messages, "answer": answer})
        return rows


def question(row: dict[str, Any]) -> str:
    return row["prompt"][-1]["content"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


TASKS = {
    task.name: task
    for task in (
        Task(
            name="sums",
            system="Answer with the number only.",
            problem=sum_of_two,
            recipe=Recipe(
                num_prompts=8,
                group_size=8,
                max_tokens=8,
                learning_rate=1e-5,
                reward="sums",
                rows=32,  # with all 64 TRL's process takes 8 GiB
            ),
            steps=20,
            warmup=Warmup(steps=10, batch=16, learning_rate=1e-5),
        ),
        Task(
            name="reverse",
            system="Spell the word backwards.",
            problem=spelled_word,
            recipe=Recipe(
                num_prompts=2, group_size=16, max_tokens=12, learning_rate=1e-5, reward="reverse"
            ),
            steps=20,
            warmup=Warmup(steps=5, batch=16, learning_rate=3e-5),
        ),
        Task(
            name="json",
            system="Answer with a JSON object with the keys name, age and city.",
            problem=person,
            recipe=Recipe(
                num_prompts=2, group_size=8, max_tokens=32, learning_rate=1e-5, reward="json_object"
            ),
            steps=20,
            warmup=Warmup(steps=1, batch=16, learning_rate=1e-5),
        ),
        Task(
            name="few",
            system="Answer with the number only.",
            problem=sum_of_two,
            recipe=Recipe(
                num_prompts=4,
                group_size=8,
                max_tokens=8,
                learning_rate=1e-5,
                reward="sums",
                rows=8,  # prompts of 600 tokens
            ),
            steps=20,
            warmup=Warmup(steps=2, batch=4, learning_rate=1e-5),
            num_examples=26,
        ),
    )
}
