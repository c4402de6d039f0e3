"""Preferences against plain torch: pairs are in several micro-batches, and on two ranks.
Margins are of frozen passes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from services.trainer.learning.correction import check_pairs
from shared.errors import BadRequest
from shared.wire import Example
from tests.support.engine_ranks import a_job, an_engine
from tests.support.trainer_reference import (
    difference,
    load,
    logprobs,
    named,
    optimizer,
    relative,
    some_examples,
    step,
    weights,
)

pytestmark = pytest.mark.engine

LINEAR = {"max_grad_norm": 1e-7}
"""Gradients far below Adam's epsilon: see test_engine.py."""

BETA = 0.3


def pairs(model: Path) -> tuple[Example, ...]:
    """Six pairs of answers of very different lengths."""
    found: list[Example] = []
    for index, example in enumerate(some_examples(model)):
        prompt = found[-1].prompt_token_ids if index % 2 else example.prompt_token_ids
        found.append(
            Example(
                prompt_token_ids=prompt,
                token_ids=example.token_ids,
                advantage=-1.0 if index % 2 else 1.0,
            )
        )
    return tuple(found)


def prefer(job: Any, batch: tuple[Example, ...], folder: Path) -> list[Any]:
    """Two updates, and the log-probs after them; the weights after them are in `folder`."""
    engine = an_engine(job)
    updates = [engine.update(batch, 0.1, supervised=True) for _ in range(2)]
    engine.save_weights(folder)
    told = engine.forward(batch)
    engine.close()
    return [*updates, *told]


def sums(network: Any, examples: tuple[Example, ...]):
    """The summed log-probs of each example's answer `[2, P]`, at temperature 1, from whole
    logits."""
    import torch

    found = [logprobs(network, e.prompt_token_ids, e.token_ids, 1.0).sum() for e in examples]
    return torch.stack(found).unflatten(0, (-1, 2)).T


@pytest.mark.parametrize(("num_ranks", "memory"), [(1, {}), (2, {"shared_prefix": "off"})])
def test_two_updates_equal_the_papers_loss_in_plain_torch(
    pools, model, tmp_path, num_ranks, memory
):
    import torch

    batch = pairs(model)
    job = a_job(
        model,
        training={"objective": "dpo", "dpo_beta": BETA, **LINEAR},
        memory={"micro_batch_tokens": 40, **memory},
        rewards=[],
    )
    *updates, told, told_of_reference = pools[num_ranks].call(prefer, job, batch, tmp_path)
    assert updates[0].metrics["num_micro_batches"] > 1

    policy, reference = load(model), load(model)
    adamw = optimizer(policy, 0.1)
    with torch.no_grad():
        anchor = sums(reference, batch)
    for update in updates:
        rewards = BETA * (sums(policy, batch) - anchor)
        margins = rewards[0] - rewards[1]
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        expected = {
            "rewards/chosen": rewards[0].mean().item(),
            "rewards/rejected": rewards[1].mean().item(),
            "rewards/margins": margins.mean().item(),
        }
        assert {name: update.metrics[name] for name in expected} == pytest.approx(
            expected, rel=1e-4, abs=1e-6
        )
        assert update.loss == pytest.approx(loss.item(), rel=1e-5)
        norm = step(policy, adamw, loss, LINEAR["max_grad_norm"])
        assert update.grad_norm == pytest.approx(norm, rel=1e-5)
    assert updates[0].loss == pytest.approx(0.6931472, rel=1e-6)  # log 2: it is its reference
    assert updates[1].metrics["rewards/accuracies"] == 1.0
    start = named(load(model))
    ours = difference(weights(tmp_path), start)
    assert relative(ours, difference(named(policy), start)) < 1e-4
    bounds = list(itertools.accumulate((len(e.token_ids) for e in batch), initial=0))
    for of_tokens, network in ((told, load(tmp_path)), (told_of_reference, reference)):
        with torch.no_grad():
            expected = sums(network, batch).T.flatten().tolist()
        found = [sum(of_tokens[start:end]) for start, end in itertools.pairwise(bounds)]
        assert found == pytest.approx(expected, abs=1e-4)


def an_answer(advantage: float, prompt: tuple[int, ...] = (1,)) -> Example:
    return Example(prompt_token_ids=prompt, token_ids=(2,), advantage=advantage)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([an_answer(1)], "got 1 examples, expected pairs"),
        ([an_answer(-1), an_answer(1)], "examples 0 and 1 have advantages -1 and 1, expected one"),
        ([an_answer(1), an_answer(-1, (3,))], "examples 0 and 1 have different prompts"),
    ],
)
def test_what_is_no_pair_is_refused(examples: list[Example], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        check_pairs(examples)
