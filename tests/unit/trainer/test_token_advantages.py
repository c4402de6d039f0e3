"""An advantage for each token, against plain torch: every loss with a ratio of the token, and the
gradient of distillation against the divergence itself. In float32 and through a bfloat16 head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.orchestrator.grpo.advantages import batch_advantages
from services.orchestrator.grpo.distilling import teacher_terms
from services.orchestrator.grpo.examples import to_examples
from services.trainer.learning.batch import collate
from services.trainer.learning.correction import loss_inputs, resolve
from services.trainer.learning.loss import Denominators, total_loss
from shared.job import CorrectionSpec, Job, TrainingSpec
from shared.wire import Batch, Example, Part, Prompt, Rollout, RolloutGroup, Score, Span

LENGTHS = [400, 37, 256, 1]
HIDDEN, VOCAB = 64, 1000
LOW, HIGH = 0.2, 0.28
DTYPES = [torch.float32, torch.bfloat16]


def plain_loss(loss: str, new: Tensor, old: Tensor, advantages: Tensor, lengths: list[int]):
    """The losses as their papers have them, token by token in float64."""
    total = torch.zeros((), dtype=torch.float64)
    start = 0
    for length in lengths:
        of_sequence = torch.zeros((), dtype=torch.float64)
        for token in range(start, start + length):
            ratio, advantage = (new[token] - old[token]).exp(), advantages[token].item()
            if loss == "cispo":
                term = -min(ratio.item(), 1 + HIGH) * advantage * new[token]
            elif loss == "sapo":
                tau = 1.0 if advantage > 0 else 1.05
                term = -4 / tau * advantage / (1 + (-tau * (ratio - 1)).exp())
            else:
                held = (advantage > 0 and ratio > 1 + HIGH) or (advantage < 0 and ratio < 1 - LOW)
                bound = 1 + HIGH if advantage > 0 else 1 - LOW
                term = torch.tensor(-bound * advantage) if held else -ratio * advantage
            of_sequence = of_sequence + term
        start += length
        total = total + of_sequence / (length if loss in ("grpo", "sapo") else 1)
    size = {"grpo": len(lengths), "sapo": len(lengths), "dr_grpo": len(lengths) * 512}
    return total / size.get(loss, sum(lengths))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo"])
def test_every_token_is_weighed_by_its_own_advantage(loss: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    num = sum(LENGTHS)
    hidden = torch.randn(num, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(0, VOCAB, (num,), generator=generator)
    advantages = 1.5 * torch.randn(num, generator=generator)
    head = (0.2 * torch.randn(HIDDEN, VOCAB, generator=generator)).to(dtype).requires_grad_()

    def logprobs() -> Tensor:
        return (hidden @ head).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]

    old = logprobs().detach() + 0.3 * torch.randn(num, generator=generator)
    pieces = [list(part) for part in (advantages.split(LENGTHS))]
    examples = [
        Example(
            prompt_token_ids=(1,),
            token_ids=[2] * len(piece),
            old_logprobs=sampled.tolist(),
            advantage=9.0,
            advantages=[float(one) for one in piece],
        )
        for piece, sampled in zip(pieces, old.split(LENGTHS), strict=True)
    ]
    ours = loss_inputs(
        collate(examples),
        logprobs(),
        correction=resolve(CorrectionSpec(ratio_base="sampler"), 0),
        denominators=Denominators(len(LENGTHS), num, num, max_tokens=512),
        training=TrainingSpec(loss=loss, clip_low=LOW, clip_high=HIGH),
    )
    found = total_loss(ours)
    expected = plain_loss(loss, logprobs().double(), old.double(), advantages.double(), LENGTHS)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(found, head)
    (plain,) = torch.autograd.grad(expected, head)
    assert gradient.abs().max() > 1e-6
    close = 1e-4 if dtype == torch.float32 else 2e-2
    difference = (gradient.float() - plain.float()).norm() / plain.float().norm()
    assert difference < close


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_distillation_has_the_gradient_of_the_reverse_kl(loss: str, dtype: torch.dtype) -> None:
    """In expectation over the next token: every token of the vocabulary is a completion of its own,
    weighted by the policy's probability of it."""
    generator = torch.Generator().manual_seed(7)
    size, weight = 50, 0.7
    hidden = torch.randn(1, HIDDEN, generator=generator).to(dtype)
    head = (0.3 * torch.randn(HIDDEN, size, generator=generator)).to(dtype).requires_grad_()
    teacher = (2 * torch.randn(size, generator=generator)).log_softmax(-1)

    def policy() -> Tensor:
        return (hidden @ head).float().log_softmax(-1)[0]

    own = policy()
    (expected,) = torch.autograd.grad(weight * (own.exp() * (own - teacher)).sum(), head)

    x = loss_inputs(
        collate(distilled(policy().detach(), teacher, weight)),
        policy(),
        correction=resolve(CorrectionSpec(), 0),
        denominators=Denominators(1, 1, 1, max_tokens=1),
        training=TrainingSpec(loss=loss),
    )
    probabilities = policy().detach().exp()
    weighted = total_loss(type(x)(**{**vars(x), "weights_N": probabilities}))
    (found,) = torch.autograd.grad(weighted, head)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found.float() - expected.float()).norm() / expected.float().norm() < close


def distilled(policy: Tensor, teacher: Tensor, weight: float) -> tuple[Example, ...]:
    """The orchestrator's examples of all completions of one token, whose teacher is alone."""
    rollouts = tuple(
        Rollout(
            text="x",
            token_ids=(id,),
            logprobs=(float(policy[id]),),
            finish_reason="length",
            spans=(Span(version=0, start=0),),
        )
        for id in range(len(policy))
    )
    scores = tuple(
        Score(
            value=0.0,
            parts={"teacher": Part(value=0.0)},
            teacher_logprobs=(float(teacher[id]),),
        )
        for id in range(len(policy))
    )
    job = Job.model_validate(
        {
            "name": "t",
            "model": "m/m",
            "steps": 1,
            "data": {"train": "x"},
            "teacher": {"model": "big", "weight": weight},
        }
    )
    batch = Batch(
        step=1,
        version=0,
        prompts=(Prompt(index=0, content="p", row={}),),
        groups=(RolloutGroup(prompt_token_ids=(1,), rollouts=rollouts),),
        scores=(scores,),
    )
    return to_examples(batch.groups, batch_advantages(batch, job), teacher_terms(batch, job))
