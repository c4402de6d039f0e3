"""The model as the loss needs it: log-probs and entropies of completion tokens, never the logits of everything.

The base model runs once over `[B, T]` and gives hidden states; those that predict a completion token, `[N, H]`, go through the
output head in chunks, each recomputed in the backward pass. So `[tokens, vocabulary]` exists for one chunk at a time.

Some models do more to their logits than the head does (a soft cap, a scale). `check_head` compares both ways on a few tokens
when a job starts and refuses such a model: silently wrong log-probs would train.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.trainer.batch import MicroBatch
from shared.errors import BadRequest

CHUNK_TOKENS = 1024
CANARY_TOKENS = 8


class Policy(nn.Module):
    """Wraps a Hugging Face causal LM. `temperature` divides the logits, as it did when they were sampled from."""

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns the log-probs `[N]` and, without gradient, the entropies `[N]` of the batch's completion tokens, in nats."""
        hidden_BTH = _hidden(self.model, batch.input_ids_BT, batch.attention_mask_BT)
        hidden_NH = hidden_BTH[batch.rows_N, batch.columns_N]
        head = self.model.get_output_embeddings()
        chunks = zip(hidden_NH.split(CHUNK_TOKENS), batch.targets_N.split(CHUNK_TOKENS), strict=True)
        parts = [
            checkpoint(chunk_logprobs, head, hidden_CH, targets_C, self.temperature, use_reentrant=False)
            for hidden_CH, targets_C in chunks
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)


def chunk_logprobs(head: nn.Module, hidden_CH: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns log softmax(head(hidden) / temperature) at the targets `[C]`, and the distribution's entropies `[C]`."""
    logits_CV = head(hidden_CH).float() / temperature
    log_total_C = logits_CV.logsumexp(-1)
    logprobs_C = logits_CV.gather(-1, targets_C[:, None])[:, 0] - log_total_C
    with torch.no_grad():
        probs_CV = (logits_CV - log_total_C[:, None]).exp()
        entropies_C = log_total_C - (probs_CV * logits_CV).sum(-1)
    return logprobs_C, entropies_C


@torch.no_grad()
def check_head(model: Any, name: str) -> None:
    """Raises BadRequest unless the output head on the last hidden state gives the model's own logits."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        raise BadRequest(f"the model {name!r} ({type(model).__name__}) has no output head apart from its body; one is needed")
    ids_BT = torch.arange(CANARY_TOKENS, device=model.device)[None] % model.config.vocab_size
    mask_BT = torch.ones_like(ids_BT)
    ours_BTV = head(_hidden(model, ids_BT, mask_BT)).float()
    theirs_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits.float()
    difference = (ours_BTV - theirs_BTV).abs().max().item()
    if difference > 1e-2 * max(1.0, theirs_BTV.abs().max().item()):
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) changes its logits after the output head (by up to {difference:.3g}); "
            "this trainer takes models whose head gives the logits as they are"
        )


def _hidden(model: Any, input_ids_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
    outputs = model.base_model(input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False)
    return outputs.last_hidden_state
