"""One batch, split over ranks and micro-batches in every way, at every ZeRO stage: the same update,
and the update of plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_ranks import SPREAD_SMALL, Ranks, a_job
from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_reference import (
    EXAMPLE_WITH_A_NAN,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    batch_without_a_nan,
    difference,
    load,
    model_with_a_nan,
    named,
    optimizer,
    reference_loss,
    relative,
    some_examples,
    step,
    weights,
)

LOSSES = ("dapo", "grpo", "gspo")  # three ways to average, two kinds of ratio
STAGES = {"dapo": (0, 1, 2, 3), "grpo": (2,), "gspo": (0, 3)}
OF_THE_SPLIT = {
    *("padding_fraction", "num_micro_batches", "memory/micro_batch_tokens"),
    *("tokens/computed", "tokens/shared_fraction"),
}
"""Metrics that tell how a batch was split."""

RECIPES = {
    "epochs": {
        "training": {"epochs": 2, "minibatches": 2, "beta": 0.05},
        "correction": {"method": "token_tis"},
    },
    "adapters": {
        "training": {"epochs": 2, "beta": 0.05, "kl": "k2"},
        "lora": {"rank": 4, "alpha": 32.0},
    },
}
"""Jobs of several optimizer steps, with a reference."""

PREFIX = tuple(range(20))
"""What all examples begin with, so that micro-batches share it."""

pytestmark = [pytest.mark.engine, pytest.mark.system]


def cases(num_ranks: int) -> list[tuple[str, int, int]]:
    """`(loss, stage, tokens of a micro-batch)`; one rank also takes the batch as a whole."""
    whole = [(loss, 2, 10_000) for loss in LOSSES] if num_ranks == 1 else []
    return whole + [(loss, stage, 64) for loss in LOSSES for stage in STAGES[loss]]


def train(folder: Path, model: Path, examples, todo) -> dict:
    """Each case's metrics, loss and gradient norm; its weights are published into a folder of its
    own."""
    import torch

    from services.trainer.zero.deepspeed_engine import start_engine

    results = {}
    for loss, stage, budget in todo:
        training = {"loss": loss, "max_grad_norm": MAX_GRAD_NORM}
        memory = {
            "zero_stage": stage,
            "micro_batch_tokens": budget,
            "deepspeed": SPREAD_SMALL if stage == 3 else {},
        }
        job = a_job(model, memory=memory, training=training, correction={"ratio_base": "sampler"})
        engine = start_engine(job, torch.device("cpu"))
        update = engine.update(examples, LEARNING_RATE)
        target = folder / f"{loss}-{stage}-{budget}"
        engine.save_weights(target)
        engine.close()
        results[(loss, stage, budget)] = (str(target), update)
    return results


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Iterator[Ranks]:
    with Ranks(1, tmp_path_factory.mktemp("one")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def results(one, two, model, tmp_path_factory) -> dict:
    """`[ranks, loss, stage, budget]` -> folder of weights and Update."""
    folder, examples = tmp_path_factory.mktemp("splits"), some_examples(model, prefix=PREFIX)
    one.submit(train, folder / "one", model, examples, cases(1))
    two.submit(train, folder / "two", model, examples, cases(2))
    return {
        (ranks, *case): result
        for ranks, group in ((1, one), (2, two))
        for case, result in group.result().items()
    }


@pytest.mark.parametrize("loss", LOSSES)
def test_any_split_at_any_zero_stage_gives_the_update_of_one_big_batch(results, model, loss):
    before = weights(model)
    folder, whole = results[1, loss, 2, 10_000]
    assert whole.metrics["num_micro_batches"] == 1
    expected = difference(weights(folder), before)
    for num_ranks, num_micro_batches in ((1, 5), (2, 3)):
        for stage in STAGES[loss]:
            folder, other = results[num_ranks, loss, stage, 64]
            assert other.metrics["num_micro_batches"] == num_micro_batches
            assert other.metrics["tokens/shared_fraction"] > 0.2
            assert whole.metrics["tokens/shared_fraction"] > other.metrics["tokens/shared_fraction"]
            distance = relative(difference(weights(folder), before), expected)
            print(
                f"{loss}, ZeRO-{stage}, {num_ranks} ranks: relative difference of the update "
                f"{distance:.2g}"
            )
            assert distance < 1e-6
            assert other.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)
            assert other.loss == pytest.approx(whole.loss, rel=1e-5)
            for name in whole.metrics.keys() - OF_THE_SPLIT:
                assert other.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5), name


@pytest.mark.parametrize("loss", LOSSES)
def test_one_big_batch_gives_the_update_of_plain_torch(results, model, loss):
    policy = load(model)
    before = named(policy)
    expected_loss = reference_loss(policy, some_examples(model, prefix=PREFIX), loss)
    expected_norm = step(policy, optimizer(policy, LEARNING_RATE), expected_loss, MAX_GRAD_NORM)
    folder, update = results[1, loss, 2, 10_000]
    assert update.loss == pytest.approx(expected_loss.item(), rel=1e-5)
    assert update.grad_norm == pytest.approx(
        expected_norm, rel=1e-5
    )  # before clipping, which would hide a wrong factor
    assert relative(difference(weights(folder), before), difference(named(policy), before)) < 2e-6


def follow(folder: Path, model: Path, examples, stages) -> dict:
    """Trains by each recipe at each stage; the weights are published into folders of their own."""
    import torch

    from services.trainer.zero.deepspeed_engine import start_engine

    results = {}
    for name, recipe in RECIPES.items():
        for stage in stages:
            memory = {
                "zero_stage": stage,
                "micro_batch_tokens": 64,
                "deepspeed": SPREAD_SMALL if stage == 3 else {},
            }
            training = recipe["training"] | {"max_grad_norm": 1e-7}
            job = a_job(model, **{**recipe, "training": training}, memory=memory)
            engine = start_engine(job, torch.device("cpu"))
            updates = [engine.update(examples, 0.1) for _ in range(2)]
            (folder / f"{name}-{stage}").mkdir(parents=True, exist_ok=True)
            engine.save_checkpoint(folder / f"{name}-{stage}")
            engine.close()
            results[name, stage] = (str(folder / f"{name}-{stage}"), updates[1])
    return results


def test_several_steps_with_reference_and_adapters_are_the_same_on_two_ranks(
    one, two, model, tmp_path
):
    """Each step begins where the one before ended, so differences add up, and the update is only so
    long beside float32's grid."""
    examples, before = some_examples(model, prefix=PREFIX), weights(model)
    one.submit(follow, tmp_path / "one", model, examples, (2,))
    two.submit(follow, tmp_path / "two", model, examples, (2, 3))
    alone, together = one.result(), two.result()
    for name in RECIPES:
        folder, expected = alone[name, 2]
        for stage in (2, 3):
            other, update = together[name, stage]
            distance = relative(
                difference(weights(other), before), difference(weights(folder), before)
            )
            print(
                f"{name}, ZeRO-{stage}, 2 ranks: relative difference of the update {distance:.2g}"
            )
            assert distance < 1e-5
            assert update.num_updates == expected.num_updates == {"epochs": 4, "adapters": 2}[name]
            assert update.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            for metric in ("loss", "kl", "mismatch/k3_kl", "entropy"):
                mine, theirs = (
                    {"loss": result.loss, **result.metrics}[metric] for result in (update, expected)
                )
                assert mine == pytest.approx(theirs, rel=1e-4), metric
    assert (Path(together["adapters", 3][0]) / "adapter" / "adapter_model.safetensors").is_file()


def refuse(job, good, bad) -> list:
    """What a batch with a NaN gives on this rank, and whether the next one trains as if it had not
    been."""
    import torch

    from services.trainer.zero.deepspeed_engine import start_engine

    answers = []
    for batches in ((good, good), (good, bad, good)):
        engine = start_engine(job, torch.device("cpu"))
        answers.append([engine.update(batch, 1e-2) for batch in batches])
        engine.close()
    return answers


def test_a_nan_that_one_rank_meets_is_skipped_by_all(two, tmp_path):
    model = model_with_a_nan(tmp_path / "broken")
    good = batch_without_a_nan()
    bad = (EXAMPLE_WITH_A_NAN, *good)
    for stage in (0, 2, 3):
        training = {"on_nonfinite": "skip", "minibatches": 2}
        job = a_job(
            model,
            training=training,
            memory={"zero_stage": stage, "micro_batch_tokens": 20, "deepspeed": SPREAD_SMALL},
        )
        plain, disturbed = two.call(refuse, job, good, bad)
        assert [update.skipped for update in disturbed] == [False, True, False]
        assert disturbed[2] == plain[1], f"ZeRO-{stage}"
