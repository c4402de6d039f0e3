"""What rounding alone makes of a canary, against two real ways to compute it that differ."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.deep_models import deep_model

pytestmark = pytest.mark.engine

LENGTH = 64


def batch() -> Any:
    from services.trainer.learning.batch import collate
    from shared.wire import Example, TokenIds

    ids = [(7919 * position + 11) % 1024 for position in range(LENGTH)]
    return collate(
        [Example(prompt_token_ids=TokenIds(ids[:1]), token_ids=TokenIds(ids[1:]), advantage=0.0)]
    )


def logprobs(model: Any) -> Any:
    import torch

    from services.trainer.learning.policy import Policy

    with torch.no_grad():
        return Policy(model, temperature=1.0)(batch())[0]


def noise_of(model: Any) -> float:
    from services.trainer.learning.policy import rounding_noise

    return rounding_noise(model, batch(), logprobs(model), chunk_tokens=1024)


def by_eager_attention(model: Any) -> float:
    """Returns how much Hugging Face's other attention, and logits that its head rounds, change
    them: two right implementations."""
    import torch

    ours_N, ids_1T = logprobs(model), batch().input_ids_BT[:, :LENGTH]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits_TV = model(ids_1T).logits[0, :-1].float()
    model.set_attn_implementation("sdpa")
    theirs_N = logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0]
    return (theirs_N - ours_N).abs().mean().item()


def test_the_noise_follows_what_depth_makes_of_bfloat16() -> None:
    """Twice the noise covers two right ways at each depth, and is not many times as much."""
    import torch

    found: list[float] = []
    for num_layers in (2, 8, 24):
        model = deep_model(num_layers).to(torch.bfloat16)
        noise, eager = noise_of(model), by_eager_attention(model)
        print(f"{num_layers} layers: noise {noise:.4f}, eager attention {eager:.4f}")
        assert 0.5 * noise < 2 * eager and eager < 1.5 * noise
        found.append(noise)
    assert 0.01 < found[0] < found[2] < 0.2
    assert found[2] > 1.4 * found[0]


def test_the_noise_in_float32_is_a_millionth_and_is_measured_alike_each_time() -> None:
    import torch

    model = deep_model(8)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = noise_of(model)
    assert 1e-7 < first < 2e-5
    assert noise_of(model) == first
    assert torch.get_rng_state().equal(state), "training's own random numbers are as they were"
    assert not any(module._forward_hooks for module in model.modules())


def test_a_number_is_moved_to_itself_or_one_of_its_neighbours() -> None:
    import torch

    from services.trainer.learning.policy import perturb

    for dtype, last_bit in ((torch.bfloat16, 2.0**-7), (torch.float32, 2.0**-23)):
        exponent = torch.tensor([1.0, -(2.0**20)]).repeat_interleave(2000)
        plain = (1.5 * exponent).to(dtype)
        other = perturb(plain, torch.Generator().manual_seed(0))
        steps = (other.double() - plain.double()) / exponent / last_bit
        counts = [steps.eq(value).sum().item() for value in (-1, 0, 1)]
        assert sum(counts) == 4000
        # 1.5 e u is more than half a step where |u| > 1/3: a sixth of [-1/2, 1/2) on either side
        assert counts[0] == pytest.approx(4000 / 6, rel=0.15)
        assert counts[2] == pytest.approx(4000 / 6, rel=0.15)
