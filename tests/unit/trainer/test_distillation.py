"""The gradient of distillation, from the orchestrator's terms to the head, against the divergence
itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.orchestrator.grpo.advantages import batch_advantages
from services.orchestrator.grpo.examples import teacher_terms, to_examples
from services.trainer.learning.batch import collate
from services.trainer.learning.correction import loss_inputs, resolve
from services.trainer.learning.loss import Denominators, total_loss
from shared.job import CorrectionSpec, Job, TrainingSpec
from shared.wire import Batch, Example, Part, Prompt, Rollout, RolloutGroup, Score, Span

HIDDEN = 64


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_distillation_has_the_gradient_of_the_reverse_kl(loss: str) -> None:
    """In expectation over the next token: every token of the vocabulary is a completion of its own,
    weighted by the policy's probability of it."""
    generator = torch.Generator().manual_seed(7)
    size, weight = 50, 0.7
    hidden = torch.randn(1, HIDDEN, generator=generator)
    head = (0.3 * torch.randn(HIDDEN, size, generator=generator)).requires_grad_()
    teacher = (2 * torch.randn(size, generator=generator)).log_softmax(-1)

    def policy() -> Tensor:
        return (hidden @ head).log_softmax(-1)[0]

    own = policy()
    (expected,) = torch.autograd.grad(weight * (own.exp() * (own - teacher)).sum(), head)

    x = loss_inputs(
        collate(distilled(policy().detach(), teacher, weight)),
        policy(),
        correction=resolve(CorrectionSpec(), 0),
        denominators=Denominators(1, 1, 1, max_tokens=1),
        spec=TrainingSpec(loss=loss),
    )
    probabilities = policy().detach().exp()
    weighted = total_loss(type(x)(**{**vars(x), "weights_N": probabilities}))
    (found,) = torch.autograd.grad(weighted, head)
    assert (found - expected).norm() / expected.norm() < 1e-5


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
