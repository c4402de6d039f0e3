"""What tests/gpu does on a GPU, tiny and on a CPU, so that it is known to run; and its arithmetic
by hand."""

import pytest
import torch

from shared.wire import Example
from tests.support.engine_ranks import warm
from tests.support.trainer_on_device import (
    TINY,
    Shape,
    bf16_parity,
    model_flops,
    one_process,
    peak_flops,
    random_examples,
    train_speed,
)

CPU = torch.device("cpu")


def test_the_flops_of_a_step_by_hand():
    shape = Shape(hidden=8, intermediate=10, layers=3, heads=4, kv_heads=2, vocab=100, tied=True)
    # A layer has q, o of 8 x 8, k, v of 8 x 4 (2 heads of 2), three of 8 x 10: 128 + 64 + 240 = 432
    # weights; 3 layers 1296. Sequences of 2 + 3 and 1 + 1 tokens: 7 tokens, 4 of them completion.
    # Weights: 2 (1296 * 7 + 800 * 4) = 24544. Pairs 5 * 6 / 2 + 2 * 3 / 2 = 18; attention 4 * 3
    # layers * 8 channels * 18 = 1728.
    examples = tuple(
        Example(
            prompt_token_ids=(1,) * p, token_ids=(1,) * c, old_logprobs=(0.0,) * c, advantage=1.0
        )
        for p, c in ((2, 3), (1, 1))
    )
    assert model_flops(shape, examples, lora=False) == 3 * (24544 + 1728)
    assert model_flops(shape, examples, lora=True) == 2 * 24544 + 3 * 1728


def test_the_weights_counted_are_those_of_the_model():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(TINY.config())
    linear = sum(
        m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)
    )  # the head too
    one = Example(prompt_token_ids=(), token_ids=(1,), old_logprobs=(0.0,), advantage=1.0)
    assert model_flops(TINY, (one,), lora=False) == 6 * linear + 3 * 4 * TINY.layers * TINY.hidden


def test_peaks_are_known_by_name():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("CPU") is None


def test_bfloat16_gives_the_logprobs_and_the_update_direction_of_float32():
    parity = bf16_parity(TINY, random_examples(TINY, 6, 8, 24), CPU)
    assert 0 < parity.mean < 0.02 and parity.largest < 0.2 and parity.cosine > 0.99


@pytest.mark.engine
def test_models_of_random_weights_train_and_are_timed():
    examples = random_examples(TINY, 8, 8, 24)
    memory = {"micro_batch_tokens": 128, "gradient_checkpointing": True, "zero_stage": 2}
    tokens = sum(8 + len(example.token_ids) for example in examples)
    with one_process(warm()) as process:
        for lora in (None, {"rank": 4}):
            speed = process.submit(train_speed, TINY, examples, CPU, memory, lora).result()
            assert speed.tokens_per_s == pytest.approx(tokens / speed.seconds)
            assert speed.mfu is None and speed.whole_logits_bytes == 4 * 512 * 128
            assert "unknown on this device" in str(speed)
