"""Training that was cut off ends with the same bytes as training that was not: the real trainer,
one and two ranks, on CPU."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from typing import Any

import pytest

from services.trainer.disk import checkpoints
from shared.errors import Conflict, HoneError
from shared.wire import Example, Logprobs, StepResult, TrainerState
from tests.support.trainer_reference import some_examples
from tests.support.trainer_service import Service, a_job

pytestmark = [pytest.mark.engine, pytest.mark.system]


@pytest.fixture(scope="module")
def batches(tiny_model) -> list[tuple[Example, ...]]:
    """What the steps train on, in turn."""
    return [some_examples(tiny_model, num=6, seed=seed) for seed in range(3)]


def train(
    service: Service, job_id: str, batches, steps: range, *, checkpoint_every: int = 0
) -> list[StepResult]:
    results = []
    for step in steps:
        results.append(service.step(job_id, step, batches[step % len(batches)]))
        if checkpoint_every and step % checkpoint_every == 0:
            service.checkpoint(job_id, step)
    return results


def same(result: StepResult) -> dict[str, Any]:
    """A step's result without the time that it took."""
    return result.model_dump(exclude={"train_s"})


def kill_last_rank(service: Service, ranks: int) -> TrainerState:
    """Kills the last rank as the kernel would, and returns the state once the trainer is ready
    again."""
    restarts = service.state().restarts
    service.processes()[2 + ranks - 1].kill()
    return service.wait_until_back(restarts + 1)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_rank_killed_at_step_7_of_12_changes_no_bit_of_the_final_weights(
    trainers, tiny_model, batches, ranks
):
    service = trainers[ranks]
    job = a_job(tiny_model, micro_batch_tokens=64, schedule="cosine")
    assert service.load("whole", job).step == 0
    whole = train(service, "whole", batches, range(1, 13))
    expected = service.publish("whole", 12).digest

    service.load("killed", job)
    before = train(service, "killed", batches, range(1, 8), checkpoint_every=3)
    restarts = service.state().restarts
    state = kill_last_rank(service, ranks)
    assert (state.job_id, state.step, state.resumed_step, state.restarts) == (
        "killed",
        6,
        6,
        restarts + 1,
    )
    failure = state.last_failure or ""
    assert failure.startswith(
        f"rank {ranks - 1} was killed by SIGKILL (signal 9), probably because memory ran out"
    )
    untold = {"logprobs": Logprobs(), "entropies": Logprobs()}
    assert service.step("killed", 6, batches[0]) == before[5].model_copy(update=untold), (
        "the checkpoint's step is answered, not applied, without what it said of tokens"
    )
    with pytest.raises(Conflict, match="got step 8, expected 7"):
        service.step("killed", 8, batches[2])
    after = train(service, "killed", batches, range(7, 13))
    assert [same(result) for result in before + after[1:]] == [same(result) for result in whole]
    assert same(after[0]) == same(before[6]), "the replayed step gives what it gave"
    assert service.publish("killed", 12).digest == expected


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero 0": ({"memory": {"zero_stage": 0}}, {}),
    "zero 1": ({"memory": {"zero_stage": 1}}, {}),
    "zero 3": ({"memory": {"zero_stage": 3}}, {}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
    "bfloat16 zero 3": ({"memory": {"zero_stage": 3}}, {"dtype": "bfloat16"}),
    "lora with dropout": ({"lora": {"rank": 4, "dropout": 0.3}}, {}),
    "lora with dropout zero 3": (
        {"lora": {"rank": 4, "dropout": 0.3}, "memory": {"zero_stage": 3}},
        {},
    ),
    "kl, epochs, minibatches": ({}, {"beta": 0.1, "epochs": 2, "minibatches": 2}),
}


OFTEN = ("bfloat16", "lora with dropout zero 3", "kl, epochs, minibatches")
"""The variants of `make test`; tests/unit/trainer/test_resumed_state.py has each stage."""


@pytest.mark.parametrize(
    "variant",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.soak) for name in VARIANTS],
)
def test_a_job_that_comes_back_continues_to_the_bit(trainers, tiny_model, batches, variant):
    service, job_id = trainers[2], "v-" + variant.replace(" ", "-").replace(",", "")
    sections, training = VARIANTS[variant]
    job = a_job(tiny_model, sections=sections, **{"learning_rate": 1e-2, **training})
    service.load(job_id, job)
    train(service, job_id, batches, range(1, 3), checkpoint_every=2)
    whole = train(service, job_id, batches, range(3, 5))
    expected = service.publish(job_id, 4).digest
    service.load("another", a_job(tiny_model))
    assert service.load(job_id, job).resumed_step == 2
    assert [same(result) for result in train(service, job_id, batches, range(3, 5))] == [
        same(result) for result in whole
    ]
    assert service.publish(job_id, 4).digest == expected


@pytest.mark.soak
def test_a_trainer_killed_while_it_writes_a_checkpoint_uses_the_one_before(
    trainers, tiny_model, batches
):
    """tests/unit/trainer/test_checkpoints.py kills a writer at any moment, without ranks."""
    service = trainers[2]
    folder = checkpoints.checkpoints_dir(service.folder / "runs", "cut-off")
    service.load("cut-off", a_job(tiny_model))
    train(service, "cut-off", batches, range(1, 3), checkpoint_every=1)
    service.step("cut-off", 3, batches[0])

    def write() -> None:
        with contextlib.suppress(HoneError):  # the ranks came back at an earlier step
            service.checkpoint("cut-off", 3)

    writing = threading.Thread(target=write)
    restarts, rank = service.state().restarts, service.processes()[2]
    writing.start()
    while not [*folder.glob(".tmp-step-000003.*")] and not (folder / "step-000003").exists():
        time.sleep(0.001)
    rank.kill()
    writing.join()
    state = service.wait_until_back(restarts + 1)
    steps = [found.step for found in checkpoints.list_checkpoints(folder)]
    assert steps in ([1, 2], [2, 3]), "the third is whole or absent"
    assert (state.step, state.damaged) == (steps[-1], ())
    assert service.step("cut-off", state.step + 1, batches[0]).step == state.step + 1
    assert not list(folder.glob(".tmp-*"))


def test_health_answers_during_a_step_and_a_client_that_disconnects_changes_nothing(
    trainers, tiny_model, batches
):
    service = trainers[1]
    service.load("away", a_job(tiny_model))
    train(service, "away", batches, range(1, 2), checkpoint_every=1)
    service.load("another", a_job(tiny_model))
    assert service.load("away", a_job(tiny_model)).step == 1
    results: list[StepResult] = []
    long = tuple(example for batch in batches for example in batch) * 20
    step = threading.Thread(target=lambda: results.append(service.step("away", 2, long)))
    step.start()
    answered = 0
    while step.is_alive():
        with urllib.request.urlopen(
            f"http://127.0.0.1:{service.port}/healthz", timeout=5
        ) as answer:
            answered += answer.status == 200
        time.sleep(0.02)
    assert answered >= 2
    assert service.step("away", 2, long) == results[0]
