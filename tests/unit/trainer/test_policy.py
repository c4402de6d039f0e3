"""The policy on real tiny models: padded, packed, alone, recomputed and adapted, it gives the
model's own log-probs."""

import copy
import types

import peft
import pytest
import torch
import transformers
from torch import nn

from services.trainer.learning import policy as policy_module
from services.trainer.learning.batch import collate
from services.trainer.learning.correction import loss_inputs, resolve
from services.trainer.learning.loss import Denominators, total_loss
from services.trainer.learning.model_checks import (
    check_head,
    checkpoint_body,
    choose_layout,
    set_recomputing,
)
from services.trainer.learning.policy import Policy
from shared.errors import BadRequest
from shared.job import CorrectionSpec, TrainingSpec
from shared.job.running import MemorySpec
from shared.wire import Example

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2}
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=False),
}


def make_model(config, attention: str = "sdpa"):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_examples() -> list[Example]:
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (4, 40)).tolist()
    shapes = [(5, 17), (12, 3), (1, 1), (20, 20)]
    return [
        Example(
            prompt_token_ids=row[:p],
            token_ids=row[p : p + c],
            old_logprobs=(-1.0,) * c,
            advantage=1.0,
        )
        for row, (p, c) in zip(ids, shapes, strict=True)
    ]


def by_hand(model, example: Example, temperature: float) -> torch.Tensor:
    """Log-probs of one completion from the whole logits of the sequence alone."""
    ids = torch.tensor([[*example.prompt_token_ids, *example.token_ids]])
    logprobs = (
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0] / temperature
    ).log_softmax(-1)
    start = len(example.prompt_token_ids)
    return logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_micro_batch_gives_the_logprobs_and_gradients_of_each_sequence_alone(
    architecture, attention, layout
):
    model, examples = make_model(CONFIGS[architecture](), attention), make_examples()
    logprobs, _ = Policy(model, 0.8, chunk_tokens=7)(collate(examples, layout=layout))
    weights = torch.linspace(-1, 1, len(logprobs))
    ours = torch.autograd.grad((logprobs * weights).sum(), list(model.parameters()))
    expected = torch.cat([by_hand(model, example, 0.8) for example in examples])
    theirs = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()


def test_trap_tied_embeddings_get_the_gradient_of_both_uses():
    model = make_model(CONFIGS["qwen2"]())
    untied = make_model(CONFIGS["qwen2"]())
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    for each in (model, untied):
        Policy(each, 1.0)(collate(make_examples()))[0].sum().backward()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    both = untied.lm_head.weight.grad + untied.model.embed_tokens.weight.grad
    torch.testing.assert_close(model.lm_head.weight.grad, both)
    assert (
        untied.lm_head.weight.grad.norm() > 0 and untied.model.embed_tokens.weight.grad.norm() > 0
    )


def test_trap_padding_equal_to_a_real_token_changes_nothing():
    """Token 0 pads; sequences full of it, and ending in it, keep each of theirs."""
    model = make_model(CONFIGS["qwen2"]())
    zeros = Example(
        prompt_token_ids=(0, 0), token_ids=(5, 0, 0), old_logprobs=(-1.0,) * 3, advantage=1.0
    )
    longer = make_examples()[3]
    logprobs, _ = Policy(model, 1.0)(collate([longer, zeros]))
    assert len(logprobs) == 20 + 3
    torch.testing.assert_close(logprobs[20:], by_hand(model, zeros, 1.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "modules", [["q_proj", "v_proj"], ["q_proj", "lm_head"]], ids=["body", "head too"]
)
def test_lora_adapters_are_seen_by_the_body_and_the_head(monkeypatch, modules):
    monkeypatch.setattr(policy_module, "MAX_CHUNK_LOGITS", 64 * 9)
    base = make_model(CONFIGS["llama"]())
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
    ).eval()
    examples = make_examples()
    logprobs, entropies = Policy(model, 1.0, chunk_tokens=11)(collate(examples))
    expected = torch.cat([by_hand(model, example, 1.0) for example in examples])
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = torch.linspace(-1, 1, len(logprobs))
    gradients = (
        torch.autograd.grad((each * weights).sum(), trained) for each in (logprobs, expected)
    )
    for mine, other in zip(*gradients, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()
    with model.disable_adapter():
        without = Policy(model, 1.0)(collate(examples))[0]
    assert (without - logprobs).abs().max() > 1e-3 and not entropies.requires_grad


@pytest.mark.parametrize("architecture", CONFIGS)
def test_prefixes_are_shared_and_rows_packed_by_torchs_own_attention(architecture):
    def chosen(**memory):
        model = make_model(CONFIGS[architecture]())
        check_head(model, "plain")
        return choose_layout(model, "plain", MemorySpec(**memory)).layout

    assert chosen() == chosen(shared_prefix="on", packing="off") == "shared"
    assert chosen(shared_prefix="off") == chosen(shared_prefix="off", packing="on") == "packed"
    assert chosen(packing="off") == "padded"


def test_eager_attention_packs_only_when_told_because_it_computes_all_pairs():
    model = make_model(CONFIGS["qwen2"](), "eager")
    assert choose_layout(model, "eager", MemorySpec()).layout == "padded"
    assert choose_layout(model, "eager", MemorySpec(packing="on")).layout == "packed"
    with pytest.raises(
        BadRequest,
        match=r"has the attention 'eager', and only \"sdpa\" is computed over a forest; "
        'memory.shared_prefix is "on", expected "off" or "auto" here',
    ):
        choose_layout(model, "eager", MemorySpec(shared_prefix="on"))
    asked = choose_layout(model, "eager", MemorySpec(attention="eager"))
    assert asked.without == (
        "prompts are computed again for each completion, because the model has the attention "
        "'eager' by memory.attention, and only \"sdpa\" is computed over a forest"
    )


class Body(nn.Module):
    """`mix` is what a token's hidden state takes from others: "none", the mean of all tokens
    "before" or of "all" in its row."""

    def __init__(self, mix: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(7, 4), mix

    def forward(self, input_ids, position_ids=None, use_cache=False):
        states = self.embed(input_ids)
        if self.mix == "before":
            states = states.cumsum(1) / torch.arange(1, states.shape[1] + 1)[:, None]
        elif self.mix == "all":
            states = states.mean(1, keepdim=True).expand_as(states)
        return type("Output", (), {"last_hidden_state": states})


class Config(types.SimpleNamespace):
    def get_text_config(self):
        return self


class Model(nn.Module):
    """The few methods of a Hugging Face causal LM that the policy uses. `scale` multiplies the
    logits after the head."""

    def __init__(self, scale: float = 1.0, mix: str = "none") -> None:
        super().__init__()
        self.base_model, self.head, self.scale = Body(mix), nn.Linear(4, 7), scale
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.config = Config(vocab_size=7, _attn_implementation="eager")

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask, use_cache):
        return type(
            "Output",
            (),
            {"logits": self.head(self.base_model(input_ids).last_hidden_state) * self.scale},
        )


def test_a_model_that_changes_its_logits_after_the_head_is_refused():
    check_head(Model(), "plain")
    with pytest.raises(
        BadRequest, match=r"the model 'capped' \(Model\) changes its logits after the output head"
    ):
        check_head(Model(scale=0.5), "capped")


def test_trap_a_model_that_sees_padding_is_refused():
    check_head(Model(mix="before"), "causal")
    with pytest.raises(
        BadRequest, match=r"the model 'both ways' \(Model\) lets a token see what comes after it"
    ):
        check_head(Model(mix="all"), "both ways")


def test_a_model_that_mixes_packed_sequences_is_refused_or_padded_where_auto():
    model = Model(mix="before")
    with pytest.raises(
        BadRequest,
        match=r"'mixing' \(Model\) mixes the sequences of a row.*"
        r"memory.packing is \"on\", expected \"off\"",
    ):
        choose_layout(model, "mixing", MemorySpec(packing="on"))
    model.config._attn_implementation = "flash_attention_2"
    assert choose_layout(model, "mixing", MemorySpec()).layout == "padded"
    apart = Model()
    apart.config._attn_implementation = "flash_attention_2"
    assert choose_layout(apart, "apart", MemorySpec()).layout == "packed"


def test_a_model_without_positions_cannot_pack():
    model = Model()
    model.base_model.forward = lambda input_ids, use_cache: None
    with pytest.raises(BadRequest, match="takes no position_ids"):
        choose_layout(model, "recurrent", MemorySpec(packing="on"))


def test_recomputing_the_layers_changes_no_bit_and_wakes_no_dropout():
    config = CONFIGS["qwen2"]()
    config.attention_dropout = 0.5
    plain = make_model(config)
    recomputing = copy.deepcopy(plain)
    checkpoint_body(recomputing, "tiny")
    calls = []
    for layer in recomputing.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients = []
    for model in (plain, recomputing):
        Policy(model, 1.0)(collate(make_examples()))[0].sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert len(calls) == 4  # two layers, each again in the backward pass
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    for is_on, num_calls in ((False, 2), (True, 4)):
        calls.clear()
        set_recomputing(recomputing, is_on)
        recomputing.zero_grad()
        Policy(recomputing, 1.0)(collate(make_examples()))[0].sum().backward()
        assert len(calls) == num_calls
        again = [parameter.grad for parameter in recomputing.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(gradients[0], again, strict=True))


def test_a_model_whose_layers_drop_out_cannot_recompute_them():
    config = transformers.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, dropout=0.1)
    with pytest.raises(
        BadRequest, match=r"the model 'opt' \(OPTForCausalLM\) applies dropout in its layers"
    ):
        checkpoint_body(model := make_model(config), "opt")
    assert not model.is_gradient_checkpointing
    assert not any(module.training for module in model.modules())
    config.dropout = 0.0
    checkpoint_body(make_model(config), "opt")


class GivenStates(nn.Module):
    """A model whose hidden states `[1, T, 3]` are given, and are the logits."""

    def __init__(self, hidden_BTH: torch.Tensor) -> None:
        super().__init__()
        self.config = transformers.PretrainedConfig()
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = nn.Parameter(torch.eye(3))
        self.hidden_BTH = hidden_BTH

    def base_model(self, **_: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(last_hidden_state=self.hidden_BTH)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_token_of_mask_0_has_no_gradient_and_no_share_of_the_loss(layout):
    # The policy says 1, a tool says 2 0, the policy says 1. All logits are 0, so each token has the
    # log-prob -ln 3; the first update's ratio is 1. Two tokens were sampled: loss -(0.5 + 0.5) / 2,
    # and by the logits of each -(0.5 / 2) (1 - p).
    turns = Example(
        prompt_token_ids=(0,),
        token_ids=(1, 2, 0, 1),
        sampled=(1, 0, 0, 1),
        old_logprobs=(-1.0, 0.0, 0.0, -1.0),
        advantage=0.5,
    )
    hidden_1TH = torch.zeros(1, 5, 3, requires_grad=True)
    batch = collate([turns], layout=layout)
    logprobs_N, _ = Policy(GivenStates(hidden_1TH), 1.0)(batch)
    loss = total_loss(
        loss_inputs(
            batch,
            logprobs_N,
            correction=resolve(CorrectionSpec(), max_staleness=0),
            denominators=Denominators(1, 2, 2, max_tokens=8),
            spec=TrainingSpec(),
        )
    )
    assert loss.item() == pytest.approx(-0.5)
    loss.backward()
    of_sampled = [0.25 / 3, -0.5 / 3, 0.25 / 3]
    nothing = [0.0, 0.0, 0.0]
    assert hidden_1TH.grad is not None
    expected = torch.tensor([[of_sampled, nothing, nothing, of_sampled, nothing]])
    torch.testing.assert_close(hidden_1TH.grad, expected)
    assert (hidden_1TH.grad[0, [1, 2, 4]] == 0).all()
