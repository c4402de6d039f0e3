"""Jobs that take turns on one engine: each one's results are those of the job alone, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shared.job import Job
from shared.wire import Example, Optimization, TokenLoss
from tests.support.engine_ranks import a_job, an_engine
from tests.support.trainer_reference import some_examples

pytestmark = pytest.mark.engine

CALL = TokenLoss(name="importance_sampling")
HOW = Optimization(
    learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5
)


def contents(folder: Path) -> dict[str, Any]:
    """Of the weights, the optimizer's state and the random numbers, by name. A file's bytes depend
    on the order in which tensors were made."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        tensors = load_file(file)
        found |= {
            f"{file.stem}/{name}": tensors[name].float().numpy().tobytes() for name in tensors
        }
    for file in sorted(folder.rglob("*.pt")):
        state = torch.load(file, weights_only=True)
        found[file.stem] = repr([state["python"], state["torch"].tolist(), state["numpy"][1:]])
    return found


def turns(
    jobs: Sequence[Job], order: Sequence[int], scripts: Sequence[Sequence[Any]], folder: Path
) -> dict[int, list[Any]]:
    """Does the next operation of the job that `order` names, each time, on one engine. Returns each
    job's answers; the last one is the digest of all that a checkpoint has."""
    import torch.distributed as dist

    engine: Any = None
    aside: dict[int, Any] = {}
    current: int | None = None
    answers: dict[int, list[Any]] = {}

    def turn_to(number: int) -> None:
        nonlocal engine, current
        if current != number and engine is None:
            engine = an_engine(jobs[number])
        elif current != number:
            aside[current] = engine.swap_out()  # pyright: ignore[reportArgumentType]
            engine.swap_in(jobs[number], aside.pop(number, None))
        current = number

    for number in order:
        turn_to(number)
        done = answers.setdefault(number, [])
        what = scripts[number][len(done)]
        if isinstance(what, Optimization):
            done.append(engine.optim_step(what))
        elif isinstance(what, tuple):
            done.append(engine.forward_backward(what, CALL))
        else:
            found = engine.update(what.examples, what.rate)
            done.append((found.loss, found.grad_norm, list(found.logprobs)))
    for number in sorted(answers):
        turn_to(number)
        own = folder / str(number)
        if dist.get_rank() == 0:
            (own / "state").mkdir(parents=True, exist_ok=True)
        dist.barrier()
        engine.save_weights(own)
        engine.save_state(own / "state")
        dist.barrier()
        answers[number].append(contents(own))
    engine.close()
    return answers


def steps(job: Job, examples: tuple[Example, ...], *, lost: bool) -> Any:
    """Returns what four updates did; before the last two the engine may have been lost, while the
    job was set aside with a gradient."""
    engine = an_engine(job)
    found = [engine.update(examples, 1e-2) for _ in range(2)]
    engine.forward_backward(examples[:4], CALL)
    if lost:
        aside = engine.swap_out()
        engine.close()
        engine = an_engine(job)
        engine.swap_in(job, aside)
    norm = engine.optim_step(HOW)
    found += [engine.update(examples, 1e-2) for _ in range(2)]
    engine.close()
    return norm, [(one.loss, one.grad_norm, list(one.logprobs)) for one in found]


@pytest.mark.parametrize(
    ("num_ranks", "stage", "dtype"), [(1, 0, "float32"), (2, 1, "float32"), (1, 2, "bfloat16")]
)
def test_a_job_that_was_set_aside_loses_nothing_with_the_engine(
    pools, model, num_ranks, stage, dtype
):
    """Adam's moments and count above all: a new engine's optimizer has none yet."""
    ranks = pools[num_ranks]
    examples = some_examples(model)
    memory = {"zero_stage": stage, "micro_batch_tokens": 40}
    lora = {"rank": 4, "dropout": 0.1}
    job = a_job(model, memory=memory, lora=lora, training={"dtype": dtype})
    kept, again = (ranks.call(partial(steps, lost=lost), job, examples) for lost in (False, True))
    assert again == kept


def freed(jobs: Sequence[Job], examples: tuple[Example, ...], *, left: bool) -> Any:
    """Returns what the first step of the second job did, after the first one was freed in its turn,
    with a gradient `left` or without."""
    engine = an_engine(jobs[0])
    if left:
        engine.forward_backward(examples, CALL)
    engine.swap_in(jobs[1], None)
    found = engine.update(examples, 1e-2)
    engine.close()
    return found.loss, found.grad_norm


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (1, 1), (2, 2)])
def test_nothing_of_a_job_that_was_freed_in_its_turn_reaches_the_next(
    pools, model, num_ranks, stage
):
    ranks = pools[num_ranks]
    examples = some_examples(model)
    memory = {"zero_stage": stage, "micro_batch_tokens": 40}
    jobs = [
        a_job(model, memory=memory, lora={"rank": 4}, seed=seed, training={"dtype": "float32"})
        for seed in (1, 2)
    ]
    clean, after = (ranks.call(partial(freed, left=left), jobs, examples) for left in (False, True))
    assert after == clean


class Step:
    """An update of a job that says no operations."""

    def __init__(self, examples: tuple[Example, ...], rate: float) -> None:
        self.examples, self.rate = examples, rate


@pytest.mark.parametrize(
    ("num_ranks", "stage", "dtype"), [(1, 0, "float32"), (1, 1, "float32"), (2, 2, "bfloat16")]
)
def test_jobs_that_take_turns_are_as_they_are_alone(
    pools, model, tmp_path, num_ranks, stage, dtype
):
    ranks = pools[num_ranks]
    examples = some_examples(model)
    common: dict[str, Any] = {
        "memory": {
            "zero_stage": stage,
            "micro_batch_tokens": 40,
        },
        "lora": {"rank": 4, "dropout": 0.1},
    }
    training = {"dtype": dtype}
    jobs = [
        a_job(model, **common, seed=1, training={**training, "weight_decay": 0.1, "beta": 0.1}),
        a_job(model, **common, seed=2, training={**training, "adam_beta1": 0.7, "minibatches": 2}),
        a_job(model, **common, seed=3, training=training),
    ]
    assert len({job.shares_as for job in jobs}) == 1
    scripts = [
        [Step(examples, 1e-2), Step(examples[:4], 1e-2), Step(examples, 1e-3)],
        [Step(examples, 1e-2), Step(examples, 2e-2), Step(examples[3:], 1e-2)],
        [examples[:3], examples[3:5], HOW, examples, HOW],
    ]
    alone = {
        number: ranks.call(
            turns, jobs, [number] * len(script), scripts, tmp_path / f"alone{number}"
        )
        for number, script in enumerate(scripts)
    }
    order = [2, 0, 1, 2, 1, 2, 0, 2, 0, 2, 1]
    shared = ranks.call(turns, jobs, order, scripts, tmp_path / "shared")
    for number, answers in shared.items():
        ours, theirs = answers.pop(), alone[number][number].pop()
        assert [name for name in theirs if ours[name] != theirs[name]] == [], f"job {number}"
        assert ours.keys() == theirs.keys()
        assert answers == alone[number][number]
