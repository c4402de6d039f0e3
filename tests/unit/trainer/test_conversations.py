"""An example of several turns, from the mask to the gradient: by hand, and as the sum of its turns
taken alone."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn

from services.trainer.learning.batch import MicroBatch, collate
from services.trainer.learning.correction import loss_inputs, resolve
from services.trainer.learning.loss import Denominators, LossInputs, total_loss
from services.trainer.learning.metrics import StepMetrics
from services.trainer.learning.policy import Policy
from shared.job import CorrectionSpec, TrainingSpec
from shared.wire import Example

TURNS = Example(
    prompt_token_ids=(0,),
    token_ids=(1, 2, 0, 1),
    sampled=(1, 0, 0, 1),
    old_logprobs=(-1.0, 0.0, 0.0, -1.0),
    advantage=0.5,
)
"""The policy says 1, a tool says 2 0, the policy says 1."""


class Blind(nn.Module):
    """Whose hidden states `[1, T, 3]` are what they are given as, and are the logits."""

    def __init__(self, hidden_BTH: Tensor) -> None:
        super().__init__()
        self.config = transformers.PretrainedConfig()
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = nn.Parameter(torch.eye(3))
        self.hidden_BTH = hidden_BTH

    def base_model(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.hidden_BTH)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


CORRECTION = resolve(CorrectionSpec(), max_staleness=0)


def inputs_of(batch: MicroBatch, logprobs_N: Tensor, num_tokens: float) -> LossInputs:
    return loss_inputs(
        batch,
        logprobs_N,
        correction=CORRECTION,
        denominators=Denominators(1, num_tokens, num_tokens, max_tokens=8),
        spec=TrainingSpec(),
    )


def loss_of(policy: Policy, batch: MicroBatch, num_tokens: float) -> Tensor:
    logprobs_N, _ = policy(batch)
    return total_loss(inputs_of(batch, logprobs_N, num_tokens))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_token_of_mask_0_has_no_gradient_and_no_share_of_the_loss(layout):
    # All logits are 0, so each token has the log-prob -ln 3; the first update's ratio is 1. Two
    # tokens were sampled: loss -(0.5 + 0.5) / 2, and by the logits of each -(0.5 / 2) (1 - p).
    hidden_1TH = torch.zeros(1, 5, 3, requires_grad=True)
    loss = loss_of(Policy(Blind(hidden_1TH), 1.0), collate([TURNS], layout=layout), num_tokens=2)
    assert loss.item() == pytest.approx(-0.5)
    loss.backward()
    of_sampled = [0.25 / 3, -0.5 / 3, 0.25 / 3]
    nothing = [0.0, 0.0, 0.0]
    assert hidden_1TH.grad is not None
    expected = torch.tensor([[of_sampled, nothing, nothing, of_sampled, nothing]])
    torch.testing.assert_close(hidden_1TH.grad, expected)
    assert (hidden_1TH.grad[0, [1, 2, 4]] == 0).all()


def test_metrics_are_over_what_the_policy_sampled(one_rank):
    # -ln 3 here and -1 there for both sampled tokens; what the tool said counts as nothing.
    metrics, batch = StepMetrics(torch.device("cpu"), TrainingSpec(), CORRECTION), collate([TURNS])
    logprobs_N, entropies_N = Policy(Blind(torch.zeros(1, 5, 3)), 1.0)(batch)
    metrics.add_mismatch(batch, logprobs_N)
    metrics.add(batch, inputs_of(batch, logprobs_N, num_tokens=2), entropies_N, torch.tensor(0.0))
    values = metrics.reduce()[1]
    assert values["mismatch/logprob_diff_mean"] == pytest.approx(math.log(3) - 1)
    assert values["mismatch/logprob_diff_max"] == pytest.approx(math.log(3) - 1)
    assert values["entropy"] == pytest.approx(math.log(3))


def test_a_conversation_trains_as_its_turns_alone_do():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen2Config(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    whole = Example(
        prompt_token_ids=(3, 4),
        token_ids=(5, 6, 7, 8, 9, 10, 11),
        sampled=(1, 1, 0, 0, 1, 1, 1),
        advantage=-0.7,
    )
    first = Example(prompt_token_ids=(3, 4), token_ids=(5, 6), advantage=-0.7)
    second = Example(prompt_token_ids=(3, 4, 5, 6, 7, 8), token_ids=(9, 10, 11), advantage=-0.7)
    policy, parameters = Policy(model, 1.0), list(model.parameters())
    together = loss_of(policy, collate([whole]), num_tokens=5)
    apart = loss_of(policy, collate([first, second]), num_tokens=5)
    assert together.item() == pytest.approx(apart.item()) == pytest.approx(0.7)
    for mine, other in zip(
        torch.autograd.grad(together, parameters),
        torch.autograd.grad(apart, parameters),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
