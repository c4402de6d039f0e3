"""Chunked log-probs against torch's own distributions, and never more than a chunk of logits at a time."""

import pytest
import torch
from torch import nn

from services.trainer import policy
from services.trainer.policy import Policy, check_head, chunk_logprobs
from shared.errors import BadRequest


class Body(nn.Module):
    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)

    def forward(self, input_ids, attention_mask, use_cache):
        return type("Output", (), {"last_hidden_state": self.embed(input_ids)})


class Model(nn.Module):
    """The few methods of a Hugging Face causal LM that the policy uses. `scale` multiplies the logits after the head."""

    def __init__(self, vocab_size: int = 7, hidden: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.base_model, self.head, self.scale = Body(vocab_size, hidden), nn.Linear(hidden, vocab_size), scale
        self.device = torch.device("cpu")
        self.config = type("Config", (), {"vocab_size": vocab_size})

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask, use_cache):
        hidden = self.base_model(input_ids, attention_mask, use_cache).last_hidden_state
        return type("Output", (), {"logits": self.head(hidden) * self.scale})


def test_logprobs_and_entropies_equal_those_of_torch_at_the_temperature():
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(4, 7), torch.randn(5, 4), torch.tensor([0, 6, 3, 3, 1])
    logprobs, entropies = chunk_logprobs(head, hidden, targets, temperature=0.7)
    expected = torch.distributions.Categorical(logits=head(hidden) / 0.7)
    torch.testing.assert_close(logprobs, expected.log_prob(targets))
    torch.testing.assert_close(entropies, expected.entropy())
    assert not entropies.requires_grad


def test_the_head_never_sees_more_than_a_chunk_and_gradients_are_those_of_one_pass(monkeypatch):
    from services.trainer.batch import collate
    from shared.wire import Example

    torch.manual_seed(0)
    batch = collate([Example(prompt_token_ids=(1, 2), token_ids=(3, 4, 5, 6, 0), old_logprobs=(-1.0,) * 5, advantage=1.0)] * 3)
    model, seen = Model(), []
    model.head.register_forward_hook(lambda _module, args, _output: seen.append(len(args[0])))
    gradients = []
    for chunk in (4, 1024):
        monkeypatch.setattr(policy, "CHUNK_TOKENS", chunk)
        model.zero_grad()
        Policy(model, 1.0)(batch)[0].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert seen[:4] == [4, 4, 4, 3]
    assert sorted(seen[4:8]) == [3, 4, 4, 4]  # each chunk again, in the backward pass
    assert seen[8:] == [15, 15]
    for chunked, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, whole)


def test_a_model_that_changes_its_logits_after_the_head_is_refused():
    check_head(Model(), "plain")
    with pytest.raises(BadRequest, match=r"the model 'capped' \(Model\) changes its logits after the output head"):
        check_head(Model(scale=0.5), "capped")
