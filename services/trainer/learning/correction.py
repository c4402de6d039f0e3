"""The loss's inputs of a micro-batch: the ratio's denominators, the advantages of preferences, and
weights that correct the loss for the difference between sampler and trainer (other kernels, other
precision, or older weights).

The weights are functions of w = exp(trainer's log-prob - sampler's), with the trainer's log-probs
from before the first update of the batch. The two sequence methods use W, the product or the
geometric mean of w over the sequence (`sequence_ratio`):

    token_tis        clamp(w, low, high)              truncated importance sampling:
                                                      fengyao.notion.site/off-policy-rl
    sequence_tis     clamp(W, low, high)              the same of the sequence
    sequence_mask    W if within [low, high], else 0
    icepop           w if within [low, high], else 0  arXiv 2510.18855

The product is the unbiased weight of a sequence, but over T tokens that differ by d nats each its
logarithm grows with T: a completion of 10,000 tokens that differ by -0.001 each has the product
4.5e-5 and the geometric mean 0.999. The geometric mean is biased and does not depend on the length
(the ratio of GSPO, arXiv 2507.18071).

A token of weight 0 has no gradient, but still counts in the loss's denominators, so that rejected
tokens do not make the others weigh more. A token without a measured sampler's log-prob takes the
trainer's, so w = 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from services.trainer.learning.batch import MicroBatch
from services.trainer.learning.examples import num_sampled
from services.trainer.learning.loss import Denominators, LossInputs, Spec, sequence_sums
from shared.errors import BadRequest
from shared.job import CorrectionSpec
from shared.wire import Example

Method = Literal["none", "token_tis", "sequence_tis", "sequence_mask", "icepop"]

BOUNDS: dict[Method, tuple[float, float]] = {
    "none": (0.5, 2.0),
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_mask": (0.0, 3.0),
    "icepop": (0.5, 5.0),
}
"""Defaults of `low` and `high`. "none" applies no weights: its bounds are only for the metrics."""

GEOMETRIC_MASK_BOUNDS = (0.99, 1.01)
"""The defaults for "sequence_mask" of the geometric mean, which is near 1 for any sequence."""


@dataclass(frozen=True)
class CorrectionSettings:
    """A correction with all values set. `method` "none": no weights."""

    method: Method
    low: float
    high: float
    ratio_base: Literal["trainer", "sampler"] = "trainer"
    geometric: bool = False

    @property
    def of_sequences(self) -> bool:
        return self.method.startswith("sequence")


OF_CALLS = CorrectionSettings("none", *BOUNDS["none"], ratio_base="sampler")
"""The settings of a program's calls: the ratio is to the sampler's log-probs."""


def resolve(correction: CorrectionSpec, max_staleness: int) -> CorrectionSettings:
    """Returns the correction with "auto" and unset bounds filled in. Raises BadRequest for a lower
    bound above the upper."""
    corrects = max_staleness > 0 and correction.ratio_base == "trainer"
    automatic: Method = "token_tis" if corrects else "none"
    method: Method = automatic if correction.method == "auto" else correction.method
    geometric = correction.sequence_ratio == "geometric_mean"
    masks_geometric = geometric and method == "sequence_mask"
    low, high = GEOMETRIC_MASK_BOUNDS if masks_geometric else BOUNDS[method]
    low = low if correction.low is None else correction.low
    high = high if correction.high is None else correction.high
    if low > high:
        raise BadRequest(
            f"correction.low is {low:g} and correction.high {high:g} with method {method!r}; "
            "expected low <= high"
        )
    return CorrectionSettings(method, low, high, correction.ratio_base, geometric)


@torch.no_grad()
def correction_weights(
    trainer_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    sequences_N: Tensor,
    num_sequences: int,
    resolved: CorrectionSettings,
) -> Tensor:
    """Returns a weight for each token `[N]`, without gradient, in the dtype of
    `trainer_logprobs_N`."""
    if resolved.method == "none":
        return torch.ones_like(trainer_logprobs_N)
    ratios_N = log_ratios(
        trainer_logprobs_N, sampler_logprobs_N, sequences_N, num_sequences, resolved
    ).exp()
    if resolved.method in ("token_tis", "sequence_tis"):
        weights_N = ratios_N.clamp(resolved.low, resolved.high)
    else:
        weights_N = torch.where(
            (ratios_N < resolved.low) | (ratios_N > resolved.high), 0.0, ratios_N
        )
    return weights_N.to(trainer_logprobs_N.dtype)


def log_ratios(
    trainer_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    sequences_N: Tensor,
    num_sequences: int,
    resolved: CorrectionSettings,
) -> Tensor:
    """Returns log w `[N]` of each token in float64; for the sequence methods log W of its
    sequence."""
    log_ratio_N = trainer_logprobs_N.double() - sampler_logprobs_N.double()
    if not resolved.of_sequences:
        return log_ratio_N
    sums_N = sequence_sums(log_ratio_N, sequences_N, num_sequences)
    if not resolved.geometric:
        return sums_N
    return sums_N / sequence_sums(torch.ones_like(sums_N), sequences_N, num_sequences)


def loss_inputs(
    batch: MicroBatch,
    logprobs_N: Tensor,
    *,
    before_N: Tensor | None = None,
    first: bool = False,
    reference_N: Tensor | None = None,
    correction: CorrectionSettings,
    denominators: Denominators,
    spec: Spec,
) -> LossInputs:
    """Returns the loss's inputs. `before_N` are the trainer's log-probs before the first update of
    the batch; None: this is the first update, and they are `logprobs_N`.

    `first`: this is the first update, so its ratio is taken to `logprobs_N` and is exactly 1. With
    `before_N`, dropout's noise would be clipped as if training had changed the policy.
    """
    now_N = logprobs_N.detach()
    trainer_N = now_N if first or before_N is None else before_N
    before_N = now_N if before_N is None else before_N
    sampler_N = known_sampler_logprobs(batch, before_N)
    return LossInputs(
        logprobs_N=logprobs_N,
        old_logprobs_N=sampler_N if correction.ratio_base == "sampler" else trainer_N,
        reference_logprobs_N=reference_N,
        advantages_N=batch.advantages_N,
        weights_N=correction_weights(
            before_N, sampler_N, batch.sequences_N, batch.num_sequences, correction
        ),
        sequences_N=batch.sequences_N,
        lengths_N=batch.lengths_N,
        in_ratio_N=batch.in_ratio_N,
        denominators=denominators,
        spec=spec,
    )


def known_sampler_logprobs(batch: MicroBatch, trainer_logprobs_N: Tensor) -> Tensor:
    """Returns the sampler's log-probs `[N]`, and the trainer's where they were not measured."""
    return torch.where(batch.measured_N, batch.sampler_logprobs_N, trainer_logprobs_N)


# --- preferences ----------------------------------------------------------------------------------


def check_pairs(examples: Sequence[Example]) -> None:
    """Raises BadRequest unless the examples are pairs of a chosen and a rejected answer, with
    advantages above 0 and below 0."""
    if len(examples) % 2:
        raise BadRequest(
            f"got {len(examples)} examples, expected pairs: training.objective is "
            '"dpo", and each chosen answer is followed by its rejected one'
        )
    for index in range(0, len(examples), 2):
        chosen, rejected = examples[index], examples[index + 1]
        if not chosen.advantage > 0 > rejected.advantage:
            raise BadRequest(
                f"examples {index} and {index + 1} have advantages {chosen.advantage:g} and "
                f"{rejected.advantage:g}, expected one above 0 (chosen) and one below 0 (rejected)"
            )
        if chosen.prompt_token_ids != rejected.prompt_token_ids:
            raise BadRequest(
                f"examples {index} and {index + 1} have different prompts, expected two answers "
                "to one prompt"
            )


@dataclass(frozen=True)
class Preferences:
    """Direct preference optimization (arXiv 2305.18290, equation 7): of two answers to a prompt,
    the chosen one becomes likelier than the rejected one, relative to the model that the job began
    with. With d the sum over an answer's tokens of logprob - reference_logprob, and P pairs,

        L = -1/P sum_p log sigmoid(m_p),    m_p = dpo_beta (d_chosen - d_rejected)

    Its gradient is the gradient of -1/P sum_t A_t logprob_t, with A_t = +-dpo_beta sigmoid(-m_p) at
    the weights of the moment: + for tokens of the chosen answer, - for tokens of the rejected one.
    So margins are computed from frozen passes first (without LoRA's dropout), and a pair's answers
    may be in any micro-batches and on any ranks.

    `advantages_T` are of all sampled tokens of the step, in the order of its examples, and
    `rewards_2P` are `dpo_beta` d of the chosen and of the rejected answers.
    """

    rewards_2P: Tensor
    advantages_T: Tensor

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        known: Sequence[tuple[MicroBatch, Tensor | None, Tensor | None]],
        dpo_beta: float,
        device: torch.device,
    ) -> Preferences:
        """Returns the preferences of a step: a collective. `known` are this rank's micro-batches
        with their tokens' log-probs, and the reference's, `[N]`."""
        lengths_E = torch.tensor([num_sampled(example) for example in examples], device=device)
        differences_T = torch.zeros(int(lengths_E.sum()), dtype=torch.float64, device=device)
        for batch, logprobs_N, reference_N in known:
            if batch.weight:
                assert logprobs_N is not None and reference_N is not None
                places_N = batch.places_N.to(device)
                differences_T[places_N] = logprobs_N.double() - reference_N.double()
        dist.all_reduce(differences_T)  # each token has its value on one rank, and 0 on the others
        of_token_T = torch.arange(len(lengths_E), device=device).repeat_interleave(lengths_E)
        sums_E = torch.zeros(len(lengths_E), dtype=torch.float64, device=device)
        rewards_P2 = dpo_beta * sums_E.index_add(0, of_token_T, differences_T).unflatten(0, (-1, 2))
        pulls_P = dpo_beta * torch.sigmoid(rewards_P2[:, 1] - rewards_P2[:, 0])
        pulls_E = torch.stack([pulls_P, -pulls_P], dim=1).flatten()
        return cls(rewards_P2.T, pulls_E[of_token_T].float())

    def applied(self, batch: MicroBatch) -> MicroBatch:
        """Returns the micro-batch with its tokens' advantages."""
        if not batch.weight:
            return batch
        places_N = batch.places_N.to(self.advantages_T.device)
        return dataclasses.replace(batch, advantages_N=self.advantages_T[places_N])

    def metrics(self) -> dict[str, float]:
        """Returns the loss, and TRL's metrics of preferences, as means over the pairs. Waits for
        the device."""
        chosen_P, rejected_P = self.rewards_2P
        margins_P = chosen_P - rejected_P
        values = {
            "loss": -logsigmoid(margins_P),
            "rewards/chosen": chosen_P,
            "rewards/rejected": rejected_P,
            "rewards/margins": margins_P,
            "rewards/accuracies": (margins_P > 0).double(),
        }
        means = torch.stack([value.mean() for value in values.values()]).tolist()
        return dict(zip(values, means, strict=True))
