"""What a job's events say of the trainer that loaded it."""

from typing import Any

from services.orchestrator.store.leases import Journal
from shared.wire import MetricsRow, TrainerState

LOADED = TrainerState(
    job_id="j", step=0, num_ranks=1, dtype="float32", device="cpu", num_parameters=1000
)


class Store:
    def __init__(self) -> None:
        self.said: list[str] = []

    async def report(self, _lease: Any, _kind: str, message: str, *_: Any, **__: Any) -> None:
        self.said.append(message)


async def test_a_model_that_cannot_share_prefixes_says_why() -> None:
    store: Any = Store()
    without = "prompts are computed again for each completion, because the model has 'mamba' layers"
    state = LOADED.model_copy(update={"without": without})
    await Journal(store, lease=None).loaded(state, 0)
    assert store.said == [without, "the trainer has 1,000 parameters as float32, 1 rank on cpu"]
    await Journal(store, lease=None).loaded(LOADED, 0)
    assert len(store.said) == 3


async def test_a_resumed_job_says_which_steps_are_trained_again() -> None:
    store: Any = Store()
    for step, furthest in ((0, 3), (2, 3), (3, 3)):
        at = LOADED.model_copy(update={"step": step})
        await Journal(store, lease=None).loaded(at, furthest)
    assert [said.partition("; ")[2] for said in store.said] == [
        "resumed at step 0: steps 1 to 3 are trained again",
        "resumed at step 2: step 3 is trained again",
        "continuing after step 3",
    ]


async def test_the_line_of_a_step_without_an_update_says_so() -> None:
    store: Any = Store()
    flat = {"reward": 0.0, "num_examples": 0.0, "frac_reward_zero_std": 1.0, "learning_rate": 1e-5}
    for step, changes in enumerate(
        ({}, {"num_examples": 8.0}, {"skipped_steps": 1.0}, {"frac_reward_zero_std": 0.5}), 1
    ):
        await Journal(store, lease=None).row(MetricsRow(step=step, metrics=flat | changes), 4)
    assert store.said == [
        "step 1/4: reward 0.000; no weight changed: no group had a signal",
        "step 2/4: reward 0.000",
        "step 3/4: reward 0.000; no weight changed: loss or gradient were not finite",
        "step 4/4: reward 0.000; no weight changed: there was no example to train on",
    ]


async def test_a_held_out_reward_has_pass_at_1_beside_it() -> None:
    store: Any = Store()
    found = {"eval/reward": 0.1, "eval/pass@1": 0.0, "eval/pass@4": 0.5, "eval/hard/reward": 0.25}
    await Journal(store, lease=None).row(MetricsRow(step=0, metrics=found), 4)
    await Journal(store, lease=None).evaluated("m/m", "", {"reward": 0.5, "pass@1": 0.25})
    assert store.said == [
        "step 0: held-out reward 0.100, 0.250 (hard); pass@1 0.000",
        "m/m: held-out reward 0.500; pass@1 0.250",
    ]
