"""Models that scale or cap their head's output: log-probs and gradients equal the model's
own logits, at the magnitude that logits of trained models have."""

import peft
import pytest
import torch
import transformers
from transformers import models as hf

from services.trainer.learning import head as head_module
from services.trainer.learning.batch import collate
from services.trainer.learning.head import as_scoring_head
from services.trainer.learning.model_checks import check_head
from services.trainer.learning.policy import Policy, adapters_off
from shared.errors import BadRequest
from tests.unit.trainer.test_policy import GROUPED, by_hand, make_examples

LAYERS = GROUPED | {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = LAYERS | {"head_dim": 32}
GEMMA_3N = GEMMA | {
    "intermediate_size": [64] * 4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 2,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
GEMMA_4 = GEMMA | {
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 30.0,
}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16}
MINICPM = {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
}

MODELS = {
    "cohere": lambda: hf.CohereConfig(**LAYERS),
    "cohere2": lambda: hf.Cohere2Config(**LAYERS, logit_scale=0.25),
    "granite": lambda: hf.GraniteConfig(**LAYERS, logits_scaling=8.0),
    "granitemoe": lambda: hf.GraniteMoeConfig(**LAYERS, logits_scaling=6.0, num_local_experts=4),
    "falcon_h1": lambda: hf.FalconH1Config(**LAYERS, **MAMBA, lm_head_multiplier=0.3),
    "hyperclovax": lambda: hf.HyperCLOVAXConfig(**LAYERS, logits_scaling=0.125),
    "minicpm3": lambda: hf.MiniCPM3Config(**LAYERS | MINICPM, dim_model_base=16),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA),
    "gemma3n": lambda: hf.Gemma3nTextConfig(**GEMMA_3N),
    "gemma4": lambda: hf.Gemma4TextConfig(**GEMMA_4),
    "nanochat": lambda: hf.NanoChatConfig(**LAYERS),
    "vaultgemma": lambda: hf.VaultGemmaConfig(**GEMMA),
}
"""Models that scale their logits, or that cap them."""
LOUD = 60.0


def make_loud(name: str):
    """Returns a model with random weights whose head's output reaches `LOUD`."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        MODELS[name](), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for _ in range(6):  # tied weights are the embedding too
            model.get_output_embeddings().weight.mul_(LOUD / loudness(model))
    assert loudness(model) == pytest.approx(LOUD, rel=0.05)
    return model


@torch.no_grad()
def loudness(model) -> float:
    """Returns the largest magnitude of what the head makes of the examples' hidden states."""
    head = model.get_output_embeddings()
    return max(
        head(model.base_model(torch.tensor([[*e.prompt_token_ids, *e.token_ids]]))[0]).abs().max()
        for e in make_examples()
    ).item()


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_gradients_are_those_of_the_models_own_logits(monkeypatch, name):
    monkeypatch.setattr(head_module, "TILE_LOGITS", {"cpu": 100})
    model, examples = make_loud(name), make_examples()
    check_head(model, name)
    parameters = [p for p in model.parameters() if p.requires_grad]
    logprobs, _ = Policy(model, 0.8, chunk_tokens=7)(collate(examples))
    weights = torch.linspace(-1, 1, len(logprobs))
    ours = torch.autograd.grad((logprobs * weights).sum(), parameters, allow_unused=True)
    expected = torch.cat([by_hand(model, example, 0.8) for example in examples])
    theirs = torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)
    total = torch.stack([g.norm() for g in theirs if g is not None]).norm()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert (mine - other).norm() <= 1e-4 * other.norm() + 1e-7 * total


@pytest.mark.parametrize("name", ["cohere", "gemma2"])
def test_adapters_on_the_head_and_the_reference_follow_the_rule(name):
    base, examples = make_loud(name), make_examples()
    # The head is tied, so it is cut loose: an adapter is to change it and not the embedding.
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    reference = torch.cat([by_hand(base, example, 0.8) for example in examples]).detach()
    wrapped = peft.get_peft_model(
        base,
        peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False),
    ).eval()
    policy = Policy(base, 0.8, chunk_tokens=7)
    torch.testing.assert_close(
        adapters_off(wrapped, policy)(collate(examples)), reference, rtol=1e-4, atol=1e-4
    )
    parameters = [p for p in base.parameters() if p.requires_grad]
    logprobs, entropies = policy(collate(examples))
    expected = torch.cat([by_hand(base, example, 0.8) for example in examples])
    assert (expected - reference).abs().max() > 0.1 and len(entropies) == len(expected)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)
    weights = torch.linspace(-1, 1, len(logprobs))
    ours = torch.autograd.grad((logprobs * weights).sum(), parameters)
    theirs = torch.autograd.grad((expected * weights).sum(), parameters)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= 1e-4 * other.norm()


def test_a_cap_that_no_configuration_says_is_refused_at_small_logits_too():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS["gemma2"]()).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-2)
    assert loudness(model) < 0.1
    check_head(model, "tiny")
    forward = type(model).forward

    def capped_at_20(self, **inputs):
        output = forward(self, **inputs)
        output.logits = 20 * (output.logits / 20).tanh()
        return output

    model.__class__ = type("Odd", (type(model),), {"forward": capped_at_20})
    with pytest.raises(
        BadRequest, match=r"the model 'odd' \(Odd\) changes its logits after the output head"
    ):
        check_head(model, "odd")


def test_capped_logits_by_hand():
    """z = 30 atanh(0.5) = 16.4792, 0 and -z, capped at 30: 15, 0, -15; at temperature 7.5: 2, 0,
    -2. log(e^2 + 1 + e^-2) = 2.142931. dz of the first: (1 - p) (1 - 0.5^2) / 7.5, p = 0.866813."""
    head = as_scoring_head(torch.nn.Linear(1, 3, bias=False))
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[16.479184], [0.0], [-16.479184]]))
    logprobs, entropies = head(torch.ones(1, 1), torch.tensor([0]), 7.5, 8, None, 30.0)
    torch.testing.assert_close(logprobs, torch.tensor([-0.142931]), rtol=0, atol=2e-6)
    # H = 2.142931 - 2 (0.866813 - 0.015876)
    torch.testing.assert_close(entropies, torch.tensor([0.441057]), rtol=0, atol=2e-6)
    logprobs.sum().backward()
    # p = 0.866813, 0.117310, 0.015876; slopes 0.75, 1, 0.75.
    expected = torch.tensor([[0.0133186], [-0.0156414], [-0.0015876]])
    torch.testing.assert_close(head.weight.grad, expected, rtol=0, atol=1e-7)
