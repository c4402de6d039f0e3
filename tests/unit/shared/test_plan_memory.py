"""What a plan says of memory, against arithmetic worked out by hand."""

from __future__ import annotations

import pytest

from shared.job import LoraSpec
from shared.plan.memory import RankMemory, Ranks, SamplerShape, sampler_memory, trainer_memory
from shared.plan.model import Model, of_config
from tests.support.plan_models import LLAMA_8B, job, model

GIB = 1 << 30

PAIRS = {
    # 2 x 494,032,768 parameters; 4 and 12 bytes of each; a layer keeps of a token
    # a = 2 (4 x 4864 + 2 x 14 x 64 + 2 x 2 x 64 + 4 x 896) + 8 x 896 = 57,344 bytes, so
    # activations are 16,384 (2 x 896 x 24 + 57,344 + 6 x 4864); logits are 8 x 2^26
    # + 6 x 151,936 x 896 + 8 x 16,384 x 896. While the last layer is computed again the head's
    # gradient waits, 2 x 151,936 x 896 bytes or 0.254 GiB: more than the 0.656 that layers keep
    # and logits. The peak is 0.920 + 1.840 + 5.521 + 1.490 + 1 + (1.977 + 0.254) GiB
    ("Qwen2.5-0.5B", 1): {
        "weights_gib": 988_065_536,
        "gradients_gib": 1_976_131_072,
        "optimizer_gib": 5_928_393_216,
        "activations_gib": 2_122_317_824,
        "logits_gib": 1_471_119_360,
        "update_gib": 0,
        "buffers_gib": 1_600_000_000,
        "peak_gib": 13_960_918_784,
    },
    # a = 2 (4 x 8960 + 2 x 12 x 128 + 2 x 2 x 128 + 4 x 1536) + 8 x 1536 = 103,424; the
    # embedding's 151,936 x 1536 elements are more than a bucket holds: 6 bytes of each
    ("Qwen2.5-1.5B", 1): {
        "weights_gib": 3_087_428_608,
        "gradients_gib": 6_174_857_216,
        "optimizer_gib": 18_524_571_648,
        "activations_gib": 3_984_588_800,
        "logits_gib": 2_138_439_680,
        "update_gib": 1_400_242_176,
        "buffers_gib": 1_600_000_000,
        "peak_gib": 34_911_935_488,
    },
    # a = 2 (4 x 18,944 + 2 x 28 x 128 + 2 x 4 x 128 + 4 x 3584) + 8 x 3584 = 225,280. The head is
    # no embedding, and too large for a bucket: its gradient, 2 x 152,064 x 3584, stays to the end.
    # ZeRO-2 over 8: an eighth of gradients and states
    ("Qwen2.5-7B", 8): {
        "weights_gib": 15_231_233_024,
        "gradients_gib": 3_807_808_256,
        "optimizer_gib": 11_423_424_768,
        "activations_gib": 8_841_592_832,
        "logits_gib": 4_276_617_216,
        "update_gib": 3_269_984_256,
        "buffers_gib": 1_600_000_000,
        "peak_gib": 43_067_795_456,
    },
}

# The kernel's backward pass, 4 A D (16,384 + 132 x 512 / A + 32,768): of queries, padded; again
# for parts of the longest node; and of gathered keys, a part of the row at a time.
KERNEL = {
    "Qwen2.5-0.5B": 4 * 14 * 64 * (16_384 + 4_827 + 32_768),
    "Qwen2.5-1.5B": 4 * 12 * 128 * (16_384 + 5_632 + 32_768),
    "Qwen2.5-7B": 4 * 28 * 128 * (16_384 + 2_413 + 32_768),
    "Llama-3.1-8B": 4 * 32 * 128 * (16_384 + 2_112 + 32_768),
}


def layer_bytes_per_token(
    model: Model, itemsize: int, device: str, lora: LoraSpec | None = None
) -> int:
    wanted = job().model_copy(update={"lora": lora})
    return RankMemory(model, wanted, Ranks(1, itemsize, device)).layer_per_token


def gib(size_bytes: float) -> float:
    return round(size_bytes / GIB, 3)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} on {pair[1]}")
def test_the_trainers_memory_is_as_worked_out_by_hand(pair: tuple[str, int]) -> None:
    name, num_ranks = pair
    found = trainer_memory(model(name), job(), Ranks(num_ranks, 2, "gpu")).model_dump()
    passes = dict.fromkeys(("activations_gib", "peak_gib"), KERNEL[name])
    expected = {part: gib(size + passes.get(part, 0)) for part, size in PAIRS[pair].items()}
    assert {part: found[part] for part in expected} == expected
    assert (found["reference_gib"], found["host_gib"], found["overhead_gib"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "states"),
    [(0, 2, 4, 12), (1, 2, 6, 12 / 4), (2, 2, 4 / 4, 12 / 4), (3, 2 / 4, 4 / 4, 12 / 4)],
)
def test_zero_shares_out_more_at_each_stage(
    stage: int, weights: float, gradients: float, states: float
) -> None:
    count = 7_615_616_512
    wanted = job(memory={"zero_stage": stage})
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(4, 2, "gpu"))
    assert found.weights_gib == gib(weights * count)
    assert found.gradients_gib == gib(gradients * count)
    assert found.optimizer_gib == gib(states * count)
    # what is reduced at a time, from stage 1 on; what stays gathered, in stage 3
    buffers = {0: 0, 3: 6 * 200_000_000 + 2 * 1_000_000_000}.get(stage, 8 * 200_000_000)
    assert found.buffers_gib == gib(buffers)


def test_in_float32_stage_0_has_no_masters_besides_the_weights() -> None:
    count = 494_032_768
    plain = job(memory={"zero_stage": 0})
    found = trainer_memory(model("Qwen2.5-0.5B"), plain, Ranks(1, 4, "gpu"))
    assert (found.weights_gib, found.optimizer_gib) == (gib(4 * count), gib(8 * count))
    found = trainer_memory(model("Qwen2.5-0.5B"), job(), Ranks(1, 4, "gpu"))
    assert found.optimizer_gib == gib(12 * count)


def test_without_checkpointing_every_layer_keeps_what_one_would() -> None:
    wanted = job(memory={"gradient_checkpointing": False, "micro_batch_tokens": 4096})
    found = trainer_memory(model("Qwen2.5-0.5B"), wanted, Ranks(1, 2, "gpu"))
    kernel = 4 * 14 * 64 * (16_384 + 4_827 + 32_768)  # 8 keys for each of 4096 tokens
    assert found.activations_gib == gib(4096 * (24 * 57_344 + 6 * 4864) + kernel)


def test_keys_that_sequences_gather_of_a_shared_prefix_are_planned() -> None:
    """With a head of keys for each head of queries, attention's backward pass takes more than the
    MLP's: 8 keys and values of a token and their gradients, once the MLP has freed what it kept."""
    many_heads = of_config({**LLAMA_8B, "num_key_value_heads": 32}, "many heads")
    kept = 2 * 4096 * 32 + 200_704 + 2 * 2 * 24 * 128
    in_attention = 4 * 8 * 2 * 32 * 128 - 4 * 2 * 14_336
    found = trainer_memory(many_heads, job(), Ranks(1, 2, "gpu"))
    kernel = KERNEL["Llama-3.1-8B"]
    assert found.activations_gib == gib(16_384 * (kept + in_attention) + kernel)
    # on a CPU in float32, whatever the model's dtype
    found = trainer_memory(many_heads, job(), Ranks(1, 2, "cpu"))
    kept += 10 * 32 * 128
    in_attention += 4 * 8 * 2 * 32 * 128
    assert found.activations_gib == gib(16_384 * (kept + in_attention))
    apart = job(memory={"shared_prefix": "off"})
    found = trainer_memory(many_heads, apart, Ranks(1, 2, "cpu"))
    assert found.activations_gib == gib(16_384 * (kept + 3 * 2 * 14_336))


def test_a_sequence_longer_than_a_micro_batch_is_one_of_its_own() -> None:
    wanted = job(sampling={"max_tokens": 32_768})
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(1, 2, "gpu"), longest=33_280)
    # 154,477 more for the parts of a node of 32,768 tokens: 132 / 28 times as many
    kernel = 4 * 28 * 128 * (16_384 + 154_477 + 32_768)
    layers = 2 * 3584 * 28 + 225_280 + 6 * 18_944
    assert found.activations_gib == gib(33_280 * layers + kernel) == 19.445
    assert found.logits_gib == gib(8 * 2**26 + 6 * 544_997_376 + 33_280 * 3584 * 8)
    # where prompts are not known, at least the completion
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(1, 2, "gpu"))
    assert found.activations_gib == gib(32_768 * layers + kernel)


def test_adapters_alone_have_gradients_and_states_under_lora() -> None:
    adapters = 16 * 24 * (1792 * 2 + 1024 * 2 + 5760 * 3)  # 8,798,208
    wanted = job(lora={"rank": 16}, training={"beta": 0.1})
    found = trainer_memory(model("Qwen2.5-0.5B"), wanted, Ranks(1, 2, "gpu"))
    assert found.weights_gib == gib(2 * (494_032_768 + adapters))
    assert (found.gradients_gib, found.optimizer_gib) == (gib(4 * adapters), gib(12 * adapters))
    # the reference is the model without its adapters, and the output head has no gradient
    assert found.reference_gib == 0
    assert found.logits_gib == gib(8 * 2**26 + 8 * 16_384 * 896)


def test_with_dropout_each_adapter_keeps_an_input_of_its_own() -> None:
    qwen, dropping = model("Qwen2.5-0.5B"), LoraSpec(dropout=0.05)
    # Inputs of q, k, v, gate and up, of o, and of down, with a mask of as many elements; without
    # dropout there are 2 x 896 + 896 + 4864.
    inputs = 5 * 896 + 896 + 4864
    plain = layer_bytes_per_token(qwen, 4, "cpu", LoraSpec())
    assert plain == layer_bytes_per_token(qwen, 4, "cpu") == 107_520
    assert layer_bytes_per_token(qwen, 4, "cpu", dropping) == plain + 8 * inputs - 4 * 7552
    assert layer_bytes_per_token(qwen, 2, "gpu", dropping) == 57_344 + 3 * inputs - 2 * 7552
    wanted = job(lora=dropping.model_dump(), memory={"micro_batch_tokens": 4096})
    found = trainer_memory(qwen, wanted, Ranks(1, 2, "gpu"))
    kept = 2 * 896 * 24 + 57_344 + 3 * inputs - 2 * 7552
    assert found.activations_gib == gib(4096 * (kept + 6 * 4864) + KERNEL["Qwen2.5-0.5B"])


def test_a_reference_model_is_a_second_copy() -> None:
    wanted = job(training={"beta": 0.01})
    found = trainer_memory(model("Qwen2.5-0.5B"), wanted, Ranks(2, 2, "gpu"))
    assert found.reference_gib == gib(2 * 494_032_768)
    spread = job(training={"beta": 0.01}, memory={"zero_stage": 3})
    found = trainer_memory(model("Qwen2.5-0.5B"), spread, Ranks(2, 2, "gpu"))
    assert found.reference_gib == gib(494_032_768)


@pytest.mark.parametrize(
    ("stage", "itemsize", "gradients", "update"),
    [
        # averaged 500 million at a time
        (0, 2, 4, 4 * 500_000_000),
        (0, 4, 4, 4 * 500_000_000),
        # a float32 sum of all, and beside it the micro-batch's own in bfloat16
        (1, 2, 6, 4 * 500_000_000),
        (1, 4, 4, 4 * 7_615_616_512 / 8),
        # 152,064 x 3584 elements are more than the 200 million of a bucket
        (2, 2, 4 / 8, 6 * 544_997_376),
        (2, 4, 4 / 8, 4 * 7_615_616_512 / 8),
        # 951,952,064 of a rank, at most a billion at a time
        (3, 2, 4 / 8, 4 * 951_952_064),
    ],
)
def test_gradients_and_their_update_are_those_of_the_stage(
    stage: int, itemsize: int, gradients: float, update: float
) -> None:
    wanted = job(memory={"zero_stage": stage})
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(8, itemsize, "gpu"))
    assert found.gradients_gib == gib(gradients * 7_615_616_512)
    assert found.update_gib == gib(update)


def test_zero_3_updates_a_billion_parameters_at_a_time() -> None:
    wanted = job(memory={"zero_stage": 3})
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(1, 2, "gpu"))
    assert found.update_gib == gib(4e9)


def test_at_stage_1_gradients_are_reduced_after_the_pass() -> None:
    # the head's tile, its gradient and its inputs, 8 x 2^26 + 8 x 544,997,376 + 1024 x 3584 x 12,
    # and 4 x 1024 x 3584 x 28 that the layers keep; with them a bucket of 4 x 200 million
    wanted = job(memory={"zero_stage": 1, "micro_batch_tokens": 1024})
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(8, 4, "gpu"))
    steady = (4 + 4 + 12 / 8) * 7_615_616_512 + GIB
    passes = 8 * 2**26 + 8 * 544_997_376 + 44_040_192 + 411_041_792
    assert found.peak_gib == gib(steady + passes + 800_000_000)
    # of two ranks, half of the gradients that were reduced are beside the buffers
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(2, 4, "gpu"))
    steady = (4 + 4 + 12 / 2) * 7_615_616_512 + GIB
    assert found.peak_gib == gib(steady + 1_600_000_000 + 4 / 2 * 7_615_616_512)


def test_gradients_that_fit_into_a_bucket_are_reduced_after_the_pass() -> None:
    adapters = 8_798_208
    wanted = job(lora={"rank": 16}, memory={"micro_batch_tokens": 1024})
    found = trainer_memory(model("Qwen2.5-0.5B"), wanted, Ranks(1, 4, "cpu"))
    # in the head 8 x 2^22, 1024 x 896 x 12 and 4 x 1024 x 896 x 24; in a layer more:
    # 1024 (4 x 896 x 24 + 107,520 + 12 x 4864) = 257,949,696
    steady = 4 * (494_032_768 + adapters) + 16 * adapters + (100 << 20)
    assert found.peak_gib == gib(steady + 257_949_696 + 4 * adapters)
    # more than a bucket holds are reduced within the pass
    wanted = job(lora={"rank": 512}, memory={"micro_batch_tokens": 64}, sampling={"max_tokens": 64})
    found = trainer_memory(model("Qwen2.5-0.5B"), wanted, Ranks(1, 2, "cpu"))
    adapters = 32 * adapters
    passes = 8 * 2**22 + 64 * 896 * 8 + 2 * 64 * 896 * 24
    steady = 2 * (494_032_768 + adapters) + 16 * adapters + (100 << 20)
    assert found.peak_gib == gib(steady + passes + 1_600_000_000)


def test_in_float32_the_reduced_gradients_of_a_micro_batch_are_a_second_sum() -> None:
    wanted = job(memory={"micro_batch_tokens": 1024})
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(8, 4, "gpu"))
    passes = 8 * 2**26 + 8 * 544_997_376 + 44_040_192 + 411_041_792
    steady = (4 + 4 / 8 + 12 / 8) * 7_615_616_512 + GIB
    assert found.peak_gib == gib(steady + passes + 4 / 8 * 7_615_616_512 + 1_600_000_000)


def test_a_small_micro_batch_leaves_the_update_to_decide() -> None:
    adapters = job(memory={"zero_stage": 3, "micro_batch_tokens": 64}, lora={"rank": 512})
    found = trainer_memory(model("Qwen2.5-7B"), adapters, Ranks(1, 2, "gpu"))
    assert found.update_gib > found.activations_gib + found.logits_gib
    parts = found.weights_gib + found.gradients_gib + found.optimizer_gib + found.buffers_gib
    assert found.peak_gib == pytest.approx(parts + found.update_gib + 1, abs=3e-3)


@pytest.mark.parametrize(
    ("stage", "itemsize", "gradients", "host"),
    [
        (1, 2, 4 + 4 / 2, 18 / 2),
        (1, 4, 4, 20 / 2),
        # bfloat16 is added up in float32, which stays on the GPU until the step
        (2, 2, 4 / 2, 18 / 2),
        # masters and moments, a gradient for each, its sum, and weights on their way back
        (2, 4, 0, 24 / 2),
        (3, 2, 0, 20 / 2),
    ],
)
def test_what_is_offloaded_is_in_the_hosts_memory(
    stage: int, itemsize: int, gradients: float, host: float
) -> None:
    count = 7_615_616_512
    wanted = job(memory={"offload_optimizer": True, "zero_stage": stage})
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(2, itemsize, "gpu"))
    assert (found.optimizer_gib, found.gradients_gib) == (0, gib(gradients * count))
    assert found.host_gib == gib(host * count)


def test_the_sum_of_offloaded_gradients_is_part_of_the_peak() -> None:
    wanted = job(memory={"offload_optimizer": True})
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(2, 2, "gpu"))
    # the embedding's gradient passes through a buffer of its size: 2 x 152,064 x 3584
    assert found.buffers_gib == gib(16e8 + 1_089_994_752)
    weights = gradients = 15_231_233_024
    working = 8_841_592_832 + 1_089_994_752 + KERNEL["Qwen2.5-7B"]
    assert found.peak_gib == gib(weights + gradients + working + 16e8 + 1_089_994_752 + GIB)


def test_on_a_cpu_what_is_offloaded_is_in_the_same_memory() -> None:
    plain = trainer_memory(model("Qwen2.5-7B"), job(), Ranks(1, 4, "cpu"))
    wanted = job(memory={"offload_optimizer": True})
    found = trainer_memory(model("Qwen2.5-7B"), wanted, Ranks(1, 4, "cpu"))
    assert (found.optimizer_gib, found.host_gib) == (gib(24 * 7_615_616_512), 0)
    assert found.peak_gib > plain.peak_gib


def test_copies_in_the_hosts_memory_are_counted() -> None:
    count = 494_032_768
    several = job(training={"minibatches": 2})
    found = trainer_memory(model("Qwen2.5-0.5B"), several, Ranks(2, 2, "gpu"))
    assert found.host_gib == gib(12 * count / 2)
    # on a CPU a copy is beside the original
    found = trainer_memory(model("Qwen2.5-0.5B"), several, Ranks(1, 4, "cpu"))
    assert (found.optimizer_gib, found.host_gib) == (gib(24 * count), 0)


def test_norms_of_queries_and_keys_keep_their_inputs() -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    }
    # 2 (4 x 12,288 + 2 x 40 x 128 + 4 x 4096) + 8 x 4096 + 40 x 128 x 6
    qwen = of_config(config, "Qwen3-8B")
    assert layer_bytes_per_token(qwen, 2, "gpu") == 215_040
    # Queries, keys, values and what comes out in float32, and that once more in bfloat16: 10 x 32 x
    # 128 and 8 x 8 x 128, in place of 4 x 40 x 128.
    assert layer_bytes_per_token(qwen, 2, "cpu") == 215_040 + 40_960 + 8_192 - 20_480
    assert layer_bytes_per_token(qwen, 4, "cpu") == layer_bytes_per_token(qwen, 4, "gpu")


def serving(**values: object) -> SamplerShape:
    usual = {"tensor_parallel": 1, "max_sequences": 256, "sequences": 256, "sequence_tokens": 1024}
    rest = {"max_adapters": 5, "itemsize": 2, "device": "gpu"}
    return SamplerShape(**{**usual, **rest, **values})  # pyright: ignore[reportArgumentType]


def test_the_samplers_memory_is_weights_cache_and_overhead() -> None:
    found = sampler_memory(model("Qwen2.5-7B"), job(), serving())
    assert found.weights_gib == gib(15_231_233_024)
    # keys and values of 28 layers, 4 heads of 128, in 2 bytes
    assert found.cache_bytes_per_token == 57_344
    assert found.cache_gib == gib(57_344 * 1024 * 256) == 14.0
    assert found.least_cache_gib == gib(57_344 * 131_072) == 7.0
    activations = 2048 * 2 * (2 * 18_944 + 4 * 3584)
    assert found.overhead_gib == gib(1.5 * GIB + activations + 256 * 152_064 * 10)


def test_a_split_model_and_a_shorter_one_need_less() -> None:
    split = sampler_memory(model("Qwen2.5-7B"), job(max_model_len=2048), serving(tensor_parallel=2))
    assert split.weights_gib == gib(15_231_233_024 / 2)
    assert split.cache_bytes_per_token == 28_672
    assert split.least_cache_gib == gib(28_672 * 2048)
    # 4 heads over 8 GPUs: each is on two of them
    most = sampler_memory(model("Qwen2.5-7B"), job(), serving(tensor_parallel=8))
    assert most.cache_bytes_per_token == 57_344 // 4


def test_a_sampler_holds_adapters_and_no_more_sequences_than_it_may() -> None:
    wanted = job(lora={"rank": 16})
    found = sampler_memory(model("Qwen2.5-0.5B"), wanted, serving(max_sequences=64, sequences=200))
    assert found.sequences == 64
    assert found.cache_gib == gib(12_288 * 1024 * 64)
    assert found.weights_gib == gib(2 * (494_032_768 + 5 * 8_798_208))
