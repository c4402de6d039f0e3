"""What a program does with the trainer, against plain torch: calls add up, and a step consumes
them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shared.errors import HoneError
from shared.job import Job
from shared.weights.folders import digest_of
from shared.wire import Example, Logprobs, Mask, Optimization, TokenIds, TokenLoss
from tests.support.engine_ranks import SPREAD_SMALL, a_job, an_engine
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

HOW = Optimization(
    learning_rate=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.01, max_grad_norm=0.5
)
"""With this epsilon an update is nearly linear in the gradient."""

LOSSES = [
    TokenLoss(name="cross_entropy"),
    TokenLoss(name="importance_sampling"),
    TokenLoss(name="ppo"),
    TokenLoss(name="ppo", ratio_low=0.95, ratio_high=1.01),
    TokenLoss(name="cispo", ratio_high=1.1),
    TokenLoss(name="dro", beta=0.3),
    TokenLoss(name="gspo", ratio_low=0.999, ratio_high=1.002),
]


@pytest.fixture(scope="module")
def examples(model) -> tuple[Example, ...]:
    """Each token has an advantage of its own, the model reads other tokens than the targets of the
    first example, and of the second every other token counts in the ratio."""
    found = []
    for one in some_examples(model):
        advantages = Logprobs([one.advantage * (-0.7) ** t for t in range(len(one.token_ids))])
        found.append(one.model_copy(update={"advantages": advantages}))
    read = TokenIds([id + 1 for id in found[0].token_ids])
    marked = Mask([(t + 1) % 2 for t in range(len(found[1].token_ids))])
    first = found[0].model_copy(update={"context_ids": read})
    return (first, found[1].model_copy(update={"ratio_mask": marked}), *found[2:])


def run(job: Job, script: Sequence[Any], folder: Path) -> list[Any]:
    """Does what the script says: a pair of examples and a loss is a call, an Optimization a step.
    Returns the answers, or errors, and writes the weights at the end."""
    engine = an_engine(job)
    answers: list[Any] = []
    for one in script:
        try:
            if isinstance(one, Optimization):
                answers.append(engine.optim_step(one))
            else:
                answers.append(engine.forward_backward(*one))
        except HoneError as error:
            answers.append(error.detail)
    folder.mkdir(parents=True, exist_ok=True)
    engine.save_weights(folder)
    engine.close()
    return answers


def logprobs_of(policy: Any, example: Example) -> Any:
    return logprobs(
        policy, example.prompt_token_ids, example.token_ids, 1.0, read=example.context_ids
    )


def loss_of(policy: Any, examples: Sequence[Example], loss: TokenLoss) -> Any:
    """Tinker's definitions, sequence by sequence."""
    import torch

    total = torch.zeros(())
    for e in examples:
        new, old = logprobs_of(policy, e), torch.tensor(list(e.old_logprobs))
        advantages, ratio = torch.tensor(list(e.advantages)), (new - old).exp()
        if loss.name == "cross_entropy":
            terms = advantages * new
        elif loss.name == "importance_sampling":
            terms = ratio * advantages
        elif loss.name == "ppo":
            bounded = ratio.clip(loss.ratio_low or 0.8, loss.ratio_high or 1.2)
            terms = torch.min(ratio * advantages, bounded * advantages)
        elif loss.name == "cispo":
            terms = ratio.clip(0, loss.ratio_high or 4).detach() * advantages * new
        elif loss.name == "gspo":
            marked = torch.tensor(list(e.ratio_mask or [1] * len(new))).bool()
            of_all = (new - old).detach()[marked].mean()
            ratio = (of_all + new - new.detach()).exp()
            terms = torch.min(ratio * advantages, ratio.clip(0.999, 1.002) * advantages)
        else:
            terms = advantages * new - 0.5 * loss.beta * (new - old) ** 2
        total = total - terms.sum()
    return total


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_of_each_loss_equals_plain_torch(pools, model, examples, tmp_path, num_ranks):
    """One after another, from the weights that the step before left."""
    import torch

    job = a_job(model, memory={"micro_batch_tokens": 40})
    how = HOW.model_copy(update={"learning_rate": 1e-3})
    script = [one for loss in LOSSES for one in ((examples, loss), how)]
    answers = pools[num_ranks].call(run, job, script, tmp_path)

    policy = load(model)
    constants = {"betas": (how.beta1, how.beta2), "eps": how.eps}
    adamw = optimizer(policy, how.learning_rate, how.weight_decay, **constants)
    start = named(policy)
    for loss, (found, of_tokens), norm in zip(LOSSES, answers[::2], answers[1::2], strict=True):
        with torch.no_grad():
            expected = torch.cat([logprobs_of(policy, e) for e in examples]).tolist()
        assert list(of_tokens) == pytest.approx(expected, abs=1e-5), loss
        total = loss_of(policy, examples, loss)
        assert found == pytest.approx(total.item(), rel=1e-5, abs=1e-5), loss
        assert norm == pytest.approx(step(policy, adamw, total, how.max_grad_norm), rel=1e-5), loss
    ours = difference(weights(tmp_path), start)
    assert relative(ours, difference(named(policy), start)) < 1e-4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "gspo", "ratio_low": 0.9}, "has no default bounds; expected ratio_low and"),
        ({"name": "ppo", "ratio_low": 1.5}, "bounds are 1.5 and 1.2; expected the lower one"),
        ({"name": "cispo", "ratio_low": 4}, "bounds are 4 and 4; expected the lower one"),
    ],
)
def test_bounds_in_the_wrong_order_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        TokenLoss(**fields)


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 0), (1, 1), (2, 2), (2, 3)])
def test_calls_add_up_and_a_step_consumes_them(pools, model, examples, tmp_path, num_ranks, stage):
    """The second step has a gradient of its own: nothing is left of the first one's."""
    ranks = pools[num_ranks]
    spread = {"deepspeed": SPREAD_SMALL} if stage == 3 else {}
    job = a_job(model, memory={"zero_stage": stage, "micro_batch_tokens": 40, **spread})
    loss = TokenLoss(name="importance_sampling")
    parts = [examples[:5], examples[5:6], examples[6:]]
    rest = [(examples[:3], loss), HOW]
    at_once = ranks.call(run, job, [(examples, loss), HOW, *rest], tmp_path / "once")
    apart = ranks.call(
        run, job, [*((part, loss) for part in parts), HOW, *rest], tmp_path / "apart"
    )
    assert sum(total for total, _ in apart[:3]) == pytest.approx(at_once[0][0], rel=1e-5)
    found = list(itertools.chain.from_iterable(of_call for _, of_call in apart[:3]))
    assert found == pytest.approx(list(at_once[0][1]), abs=1e-5)
    assert apart[3] == pytest.approx(at_once[1], rel=1e-5)
    assert apart[5] == pytest.approx(at_once[3], rel=1e-4)
    start = named(load(model))
    once, several = (difference(weights(tmp_path / one), start) for one in ("once", "apart"))
    assert relative(several, once) < 1e-4


def test_a_loss_that_is_not_finite_leaves_the_gradient_as_it_was(rank, model, examples, tmp_path):
    loss = TokenLoss(name="cross_entropy")
    big = examples[0].model_copy(
        update={"advantages": Logprobs([3e38] * len(examples[0].token_ids))}
    )
    dro = TokenLoss(name="dro")
    far = big.model_copy(update={"old_logprobs": Logprobs([1e30] * len(big.token_ids))})
    job = a_job(model, memory={"micro_batch_tokens": 40})
    good = [(examples[:5], loss), (examples[5:], loss), HOW]
    expected = rank.call(run, job, good, tmp_path / "good")
    script = [good[0], ((far,), dro), good[1], HOW]
    first, error, second, norm = rank.call(run, job, script, tmp_path / "spoilt")
    assert error.startswith("the loss 'dro' of 1 examples is ")
    assert error.endswith("expected a finite number; the gradient is as it was")
    assert (first, second, norm) == tuple(expected)
    start = named(load(model))
    ours, theirs = (difference(weights(tmp_path / one), start) for one in ("spoilt", "good"))
    assert relative(ours, theirs) == 0.0


def test_a_step_without_a_call_moves_by_adams_means_alone(rank, model, examples, tmp_path):
    job = a_job(model, memory={"micro_batch_tokens": 40})
    still = HOW.model_copy(update={"weight_decay": 0.0})
    loss = TokenLoss(name="cross_entropy")
    assert rank.call(run, job, [still], tmp_path / "still") == [0.0]
    start = named(load(model))
    assert all(not d.any() for d in difference(weights(tmp_path / "still"), start).values())
    answers = rank.call(run, job, [(examples, loss), still, still], tmp_path / "moved")
    assert answers[1] > 0 and answers[2] == 0.0
    assert not math.isnan(answers[1])


def run_short_of_memory(job: Job, script: Sequence[Any], folder: Path) -> tuple[str, int]:
    """Does two calls and a step, with the second call's second backward pass out of memory; if that
    was refused, once more. Returns the error, and the tokens of a micro-batch afterwards."""
    import torch

    engine = an_engine(job)
    first, second, how = script
    engine.forward_backward(*first)
    passes = itertools.count(1)

    def fail(*_: Any) -> None:
        if next(passes) == 2:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. See documentation")

    layer = engine._parts.model.model.layers[0]
    handle, error = layer.mlp.register_full_backward_hook(fail), ""
    try:
        engine.forward_backward(*second)
    except HoneError as refused:
        error = refused.detail
    handle.remove()
    if error:
        engine.forward_backward(*second)
    engine.optim_step(how)
    engine.save_weights(folder)
    budget = engine._parts.updater.job.memory.micro_batch_tokens
    engine.close()
    return error, budget


@pytest.mark.parametrize(
    ("tokens", "checkpointing", "becomes"),
    [
        (60, True, "divided"),
        (1, True, "refused"),
        (60, "auto", "recomputed"),
        (1, "auto", "recomputed"),
    ],
)
def test_a_call_out_of_memory_is_repeated_or_as_if_it_had_never_come(
    rank, model, examples, tmp_path, tokens, checkpointing, becomes
):
    """The gradient is then the one that micro-batches of that size give from the beginning, to the
    bit. Dropout draws random numbers, which a call that is taken back must give back too; it
    depends on how examples are divided."""
    lora = {"rank": 2, "dropout": 0.0 if becomes == "divided" else 0.5, "alpha": 64.0}
    memory = {"micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing}
    job = a_job(model, memory=memory, lora=lora)
    loss = TokenLoss(name="importance_sampling")
    script = [(examples[:6], loss), (examples, loss), HOW]
    for name in ("short", "plain"):
        (tmp_path / name).mkdir()
    error, fitting = rank.call(run_short_of_memory, job, script, tmp_path / "short")
    assert (error != "", fitting < tokens) == (becomes == "refused", becomes == "divided")
    assert not error or "out of memory in a micro-batch of 1 sequence(s)" in error
    small = a_job(model, memory=memory | {"micro_batch_tokens": fitting}, lora=lora)
    rank.call(run, small, script, tmp_path / "plain")
    assert digest_of(tmp_path / "plain") != digest_of(model)
    assert digest_of(tmp_path / "short") == digest_of(tmp_path / "plain")
