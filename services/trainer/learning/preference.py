"""Direct preference optimization (arXiv 2305.18290, equation 7): of two answers to a prompt, the
chosen one becomes likelier than the rejected one, relative to the model that the job began with.

With d the sum over an answer's tokens of logprob - reference_logprob, and P pairs, the loss is

    L = -1/P sum_p log sigmoid(m_p),    m_p = dpo_beta (d_chosen - d_rejected)

Its gradient is that of -1/P sum_t A_t logprob_t, with A_t = +-dpo_beta sigmoid(-m_p) at the weights
of the moment: + for the tokens of the chosen answer, - for the tokens of the rejected one. So the
margins are computed from frozen passes first, and then a pair's answers may be in any micro-batches
and on any ranks. With LoRA's dropout the margins are those without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from services.trainer.learning.batch import MicroBatch
from services.trainer.learning.examples import num_sampled
from shared.errors import BadRequest
from shared.wire import Example


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
                f"examples {index} and {index + 1} have unlike prompts, expected two answers to "
                "one prompt"
            )


@dataclass(frozen=True)
class Preferences:
    """A step's margins `[P]`, and what they make of its tokens: `advantages_T` of all sampled
    tokens of the step, in the order of its examples. `rewards_2P` are `dpo_beta` d of the chosen
    and of the rejected answers."""

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
        dist.all_reduce(differences_T)  # each token is one rank's, and 0 elsewhere
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
