"""Which faults strike, and at which stage of a step: drawn from a seed, so that each kind of fault
meets several stages."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

STAGES = (
    "sampling",
    "grading",
    "storing",
    "training",
    "publishing",
    "loading",
    "committing",
    "checkpointing",
    "evaluating",
)

PROCESSES = (
    "orchestrator",
    "trainer",
    "rank 0",
    "rank 1",
    "rollout",
    "engine",
    "reward",
    "redis",
)
"""What is killed. "trainer" is its launcher, "engine" the sampler's process of vLLM."""

STOPPED = ("orchestrator", "rank 0", "engine", "reward", "redis")
LINKED = ("trainer", "rollout", "reward", "redis")
"""What the orchestrator reaches by a connection that can be cut or slowed."""

KINDS = (
    *itertools.product(("kill -9", "SIGTERM"), PROCESSES),
    *itertools.product(("SIGSTOP",), STOPPED),
    *itertools.product(("cut off", "slow"), LINKED),
    ("away", "redis"),
    ("full", "disk"),
)
"""What is done, and to what. "away": killed, and started from its file after more than a lease."""

KILLED = {
    "worker": ("worker", "orchestrator", "engine", "rollout"),
    "class": ("reward", "orchestrator", "engine", "rollout"),
}
"""What is killed while conversations are played, by the kind of their environment. Of kind "class"
the reward service is the environment's server."""


@dataclass(frozen=True)
class Fault:
    """`delay` says how far into its stage it strikes: from 0 to 1 of what that takes at least."""

    number: int
    how: str
    what: str
    stage: str
    delay: float

    def __str__(self) -> str:
        return f"{self.what} {self.how} while {self.stage}"

    @property
    def kind(self) -> str:
        return f"{self.what}: {self.how}"


def draw(seed: int, count: int) -> list[Fault]:
    """Returns `count` faults: no kind meets a stage twice, nor a second stage before every other
    kind has met a first one."""
    choose = random.Random(seed)
    stages = {kind: choose.sample(STAGES, len(STAGES)) for kind in KINDS}
    rounds = (
        (how, what, stages[how, what][number])
        for number in range(len(STAGES))
        for how, what in choose.sample(KINDS, len(KINDS))
    )
    return [
        Fault(number, how, what, stage, choose.random())
        for number, (how, what, stage) in enumerate(itertools.islice(rounds, count))
    ]


def draw_episodes(seed: int, count: int, environment: str) -> list[Fault]:
    """Returns `count` kills in the middle of episodes."""
    choose = random.Random(seed)
    stages = ("sampling",) if environment == "worker" else ("sampling", "acting")
    killed = itertools.cycle(KILLED[environment])
    return [
        Fault(number, "kill -9", what, choose.choice(stages), choose.random())
        for number, what in enumerate(itertools.islice(killed, count))
    ]
