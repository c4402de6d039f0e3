"""Where a job fits, how long its steps take, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import BadRequest
from shared.job import Job
from shared.plan.gpus import cpu, parse_gpus
from shared.plan.model import UnknownModelSize
from shared.plan.planning import make_plan, passes
from shared.settings import Settings
from shared.wire import Plan, PromptLengths
from shared.wire.records import StepTime
from tests.support.plan_models import job, model

KNOWN = PromptLengths(longest=512, is_all=True)


def planned(
    name: str, gpus: str, wanted: Job | None = None, lengths: PromptLengths = KNOWN, **settings: Any
) -> Plan:
    return make_plan(wanted or job(), model(name), Settings(**settings), parse_gpus(gpus), lengths)


def kinds(plan: Plan) -> list[tuple[str, int, int, int, bool]]:
    every = (plan.placement, *plan.others)
    return [(p.kind, p.trainer_ranks, p.num_samplers, p.tensor_parallel, p.fits) for p in every]


def test_a_small_model_and_its_sampler_take_turns_on_a_small_gpu() -> None:
    wanted = job(memory={"micro_batch_tokens": 24_576})
    plan = planned("Qwen2.5-0.5B", "1xA10G-24GB", wanted)
    assert plan.fits and plan.placement.settings == {
        "HONE_COLOCATE": "1",
        "HONE_TRAINER_RANKS": "1",
        "HONE_GPU_MEMORY_UTILIZATION": "0.60",
    }
    # 14.2 GiB for the trainer: 0.95 x 22 - 1 has room for it, what a sampler leaves has not
    assert kinds(plan) == [("turns", 1, 1, 1, True), ("shared", 1, 1, 1, False)]
    assert plan.others[0].why_not == ("the trainer needs 14.2 GiB on each GPU and has 13.2",)


def test_of_two_equally_fast_placements_the_one_without_turns_is_chosen() -> None:
    assert [kind for kind, *_ in kinds(planned("Qwen2.5-0.5B", "1xH100"))] == ["shared", "turns"]


def test_a_job_that_samples_ahead_does_not_take_turns() -> None:
    plan = planned("Qwen2.5-0.5B", "1xA100-80GB", job(max_staleness=1))
    assert [kind for kind, *_ in kinds(plan)] == ["shared"]


def test_all_ways_to_deal_out_gpus_are_tried_and_the_fastest_is_chosen() -> None:
    plan = planned("Qwen2.5-7B", "4xH100")
    times = [p.time.step_s for p in (plan.placement, *plan.others) if p.time]
    assert times == sorted(times)
    assert sorted(kind[:4] for kind in kinds(plan)) == [
        ("split", 1, 1, 2),
        ("split", 1, 3, 1),
        ("split", 2, 1, 2),
        ("split", 2, 2, 1),
        ("split", 3, 1, 1),
        ("turns", 4, 1, 4),
    ]
    # a rank that is alone holds 139 GiB, of two each 83
    assert [kind[1] for kind in kinds(plan) if kind[4]] == [4, 3]


def test_a_model_too_large_for_a_samplers_gpu_is_split_over_several() -> None:
    plan = planned("Llama-3.1-8B", "12xL40S")
    # 15 GiB of weights and 16 of the cache for its 131,072 tokens are more than 0.85 x 44.4 less
    # overhead holds beside each other, and less over 2
    assert plan.fits and plan.placement.tensor_parallel > 1
    split = str(plan.placement.tensor_parallel)
    assert plan.placement.settings["HONE_TENSOR_PARALLEL_SIZE"] == split


def test_on_a_cpu_both_are_in_the_hosts_memory() -> None:
    plan = planned("Qwen2.5-0.5B", "cpu", kv_cache_gib=1)
    assert plan.placement.kind == "cpu" and plan.placement.time is None
    sampler = plan.placement.sampler
    assert plan.placement.sampler_room_gib == sampler.weights_gib + sampler.overhead_gib + 1
    assert "the time of a step is not estimated: there are no rates for cpu" in plan.notes
    two = planned("Qwen2.5-0.5B", "cpu", kv_cache_gib=1, trainer_ranks=2).placement
    assert two.trainer_room_gib == pytest.approx(plan.placement.trainer_room_gib / 2, abs=0.01)


def test_prompts_of_an_unknown_length_are_said_to_be_guessed() -> None:
    plan = planned("Qwen2.5-0.5B", "1xH100", lengths=PromptLengths())
    assert plan.prompt_tokens == 512
    assert plan.notes[0] == "prompts are taken to be of 512 tokens (--prompt-tokens)"
    why = PromptLengths(why_not="there is no file 'x'")
    plan = planned("Qwen2.5-0.5B", "1xH100", lengths=why)
    assert plan.notes[0].endswith(" of 512 tokens (--prompt-tokens): there is no file 'x'")
    plan = planned("Qwen2.5-0.5B", "1xH100", job(max_model_len=600), PromptLengths())
    assert plan.prompt_tokens == 88
    counted = planned("Qwen2.5-0.5B", "1xH100", lengths=PromptLengths(longest=9, num=20))
    assert counted.notes[0] == "the longest of 20 of the prompts has 9 tokens"


def test_what_the_model_does_not_hold_is_no_plan() -> None:
    short = {"max_tokens": 512}
    assert planned("Qwen2.5-0.5B", "1xH100", job(max_model_len=1024, sampling=short)).fits
    with pytest.raises(BadRequest, match=r"max_tokens is 512, .* expected at most 511"):
        planned("Qwen2.5-0.5B", "1xH100", job(max_model_len=512, sampling=short))


def test_the_samplers_share_leaves_room_for_the_weights_that_stay() -> None:
    wanted = job(lora={"rank": 16}, max_model_len=2048)
    plan = planned("Llama-3.1-8B", "1xA100-40GB", wanted, gpu_memory_utilization=0.7)
    # 15.0 GiB of weights and 1 of overhead, of 39.4: 59 % are left
    assert plan.placement.settings["HONE_GPU_MEMORY_UTILIZATION"] == "0.59"
    assert plan.fits and plan.placement.kind == "turns"


def test_optimizer_states_that_cannot_be_moved_stay_beside_the_sampler() -> None:
    # 0.92 of weights, 1 of overhead, and 12 bytes of each parameter, 5.52; at stage 1 6 more
    for stage, stays in ((0, 7.44), (1, 10.2), (2, 1.92)):
        wanted = job(memory={"zero_stage": stage}, max_model_len=2048)
        plan = planned("Qwen2.5-0.5B", "1xA10G", wanted, gpu_memory_utilization=0.93)
        (turns,) = (p for p in (plan.placement, *plan.others) if p.kind == "turns")
        assert turns.sampler_room_gib == pytest.approx(22 - stays, abs=0.22)  # whole percents


def test_zero_3_takes_turns_only_with_its_optimizer_elsewhere() -> None:
    wanted = job(memory={"zero_stage": 3})
    assert "turns" not in [kind for kind, *_ in kinds(planned("Qwen2.5-0.5B", "2xH100", wanted))]
    wanted = job(memory={"zero_stage": 3, "offload_optimizer": True})
    assert "turns" in [kind for kind, *_ in kinds(planned("Qwen2.5-0.5B", "2xH100", wanted))]


def test_a_step_of_fewer_tokens_than_a_micro_batch_takes_less_memory() -> None:
    small = {"prompts_per_step": 24, "group_size": 8, "max_tokens": 8}
    known = PromptLengths(longest=37, is_all=True)

    def activations_gib(**sections: Any) -> float:
        wanted = job(**({"sampling": small} | sections))
        plan = planned("Qwen2.5-0.5B", "1xH100", wanted, known)
        return plan.placement.trainer.activations_gib

    def at(tokens: int) -> float:
        many = {"prompts_per_step": 1000, "group_size": 8, "max_tokens": 8}
        return activations_gib(sampling=many, memory={"micro_batch_tokens": tokens})

    # 24 prompts of 37 tokens and 192 completions of 8; without sharing 192 prompts
    assert activations_gib() == at(24 * 37 + 192 * 8)
    assert activations_gib(memory={"shared_prefix": "off"}) == at(192 * 45)
    assert activations_gib(memory={"micro_batch_tokens": 1000}) == at(1000)
    # an environment's turns are longer than a prompt and a completion
    played = {"environment": {"file": "x.py", "name": "X"}, "rewards": [{"grader": "environment"}]}
    assert activations_gib(**played) == at(16_384)


def test_a_job_that_does_not_fit_says_what_is_lacking() -> None:
    plan = planned("Qwen2.5-7B", "1xA100-80GB")
    # 14.2 of weights, 28.4 of gradients, 9.2 of a micro-batch, 2.5 of buffers and 1
    assert not plan.fits and "the trainer needs" in plan.placement.why_not[0]
    assert planned("Qwen2.5-7B", "1xA100-80GB", job(memory={"offload_optimizer": True})).fits
    # 14.96 of weights, 29.92 of gradients, 8.38 of a micro-batch and 0.98 of the head's gradient,
    # 1.49 + 0.98, 0.78 of attention's kernel, and 1
    plan = planned("Llama-3.1-8B", "1xA100-40GB", job(memory={"offload_optimizer": True}))
    assert not plan.fits
    assert plan.placement.trainer.peak_gib == pytest.approx(58.48, abs=0.01)


def test_layers_are_computed_again_only_where_a_step_would_not_fit_without() -> None:
    # Without, 24 layers of 57,344 bytes for 16,384 tokens are 22 GiB beside 12 GiB of the rest,
    # which an A100 of 40 GB holds while the sampler sleeps, and an A10G of 22 GiB does not.
    small, large = (planned("Qwen2.5-0.5B", gpus) for gpus in ("1xA10G-24GB", "1xA100-40GB"))
    assert (small.fits, small.placement.recomputes) == (True, True)
    assert (large.fits, large.placement.recomputes) == (True, False)
    off, on = (
        planned("Qwen2.5-0.5B", "1xA100-40GB", job(memory={"gradient_checkpointing": wanted}))
        for wanted in (False, True)
    )
    assert large.placement == off.placement
    assert (
        on.placement.recomputes and on.placement.trainer.peak_gib < off.placement.trainer.peak_gib
    )


def test_on_a_cpu_layers_are_computed_again_unless_freed_blocks_can_be_kept() -> None:
    """Kept blocks take 1.5 times the plan, of which half of the host's memory may be."""
    small = {"prompts_per_step": 1, "group_size": 8, "max_tokens": 64}
    wanted = job(sampling=small, training={"dtype": "float32"})
    without = job(
        sampling=small, training={"dtype": "float32"}, memory={"gradient_checkpointing": False}
    )
    peak_gib = planned("Qwen2.5-0.5B", "cpu", without).placement.trainer.peak_gib
    for host_gib, recomputes in ((3.1 * peak_gib, False), (2.9 * peak_gib, True)):
        host = cpu(int(host_gib * 2**30))
        plan = make_plan(wanted, model("Qwen2.5-0.5B"), Settings(kv_cache_gib=1), host, KNOWN)
        assert plan.placement.recomputes is recomputes


# how long


def time_of(gpus: str = "1xA100-80GB", **sections: Any) -> StepTime:
    """Returns the time of 64 completions of 100 tokens after 50, 8 to a prompt."""
    usual = {"prompts_per_step": 8, "group_size": 8, "max_tokens": 100}
    known = PromptLengths(longest=50, is_all=True)
    plan = planned("Qwen2.5-1.5B", gpus, job(**({"sampling": usual} | sections)), known)
    assert plan.placement.time is not None
    return plan.placement.time


def test_a_steps_time_is_as_worked_out_by_hand() -> None:
    count = 1_543_714_304
    # an iteration reads 2 x 1.54e9 bytes of weights and 64 x 100 tokens of 28,672 bytes of cache,
    # at 0.6 x 2039e9 per second: 2.7 ms, and 5 ms; 100 of them; then 8 prompts of 50 tokens
    read_s = (2 * count + 64 * 100 * 28_672) / (0.6 * 2039e9)
    prompts_s = 2 * count * 8 * 50 / (0.5 * 312e12)
    time = time_of()
    assert time.sample_s == pytest.approx(100 * (read_s + 0.005) + prompts_s, abs=1e-3)
    # 3 passes (it fits without checkpointing) over 64 x 100 tokens after 8 prompts of 50, of
    # 2 x 1.54e9 operations each, and 2 x 28 x 12 x 128 for each of the 150 tokens of a sequence
    operations = 3 * (64 * 100 + 8 * 50) * (2 * count + 2 * 28 * 12 * 128 * 150)
    assert time.train_s == pytest.approx(operations / (0.35 * 312e12), abs=1e-3)
    assert time.step_s == pytest.approx(time.sample_s + time.train_s, abs=2e-3)
    # at 19.5e12 products per second those of 64 sequences take longer than reading the weights
    products_s = 2 * count * (100 * 64 + 8 * 50) / (0.5 * 19.5e12)
    single = time_of(training={"dtype": "float32"})
    assert single.sample_s == pytest.approx(products_s + 100 * 0.005, abs=1e-3)


def test_prompts_count_once_for_their_group_if_the_trainer_shares_prefixes() -> None:
    once, off = time_of(), time_of(memory={"shared_prefix": "off"})
    assert off.train_s / once.train_s == pytest.approx(9600 / 6800, rel=2e-3)
    for memory in ({"packing": "off"}, {"attention": "eager"}, {"attention": "flash_attention_2"}):
        assert time_of(memory=memory) == off
    for memory in ({"attention": "sdpa"}, {"packing": "off", "shared_prefix": "on"}):
        assert time_of(memory=memory) == once


@pytest.mark.parametrize(
    ("sections", "count"),
    [
        ({}, 4),
        ({"memory": {"gradient_checkpointing": False}}, 3),
        ({"lora": {"rank": 8}}, 3),
        # a pass without dropout, which sampled them
        ({"lora": {"rank": 8, "dropout": 0.1}}, 4),
        ({"training": {"beta": 0.1}}, 5),
        ({"training": {"epochs": 2}}, 9),
        ({"training": {"minibatches": 2}}, 5),
    ],
)
def test_a_token_goes_through_the_model_so_often(sections: dict[str, Any], count: int) -> None:
    wanted = job(**sections)
    assert passes(wanted, bool(wanted.memory.gradient_checkpointing)) == count


def test_sampling_ahead_hides_the_shorter_of_sampling_and_training() -> None:
    plan = planned("Qwen2.5-0.5B", "2xA100-80GB", job(max_staleness=1))
    time = plan.placement.time
    assert time is not None and plan.placement.kind == "split"
    assert time.step_s == max(time.sample_s, time.train_s)


# how much


def test_the_cost_is_hours_by_the_price_that_is_set() -> None:
    plan = planned("Qwen2.5-0.5B", "2xH100", price_per_hour=7.2, currency="EUR")
    time, cost = plan.placement.time, plan.cost
    assert time is not None and cost is not None
    assert (cost.currency, cost.per_hour) == ("EUR", 7.2)
    assert cost.total == pytest.approx(100 * time.step_s / 3600 * 7.2, abs=1e-3)
    assert cost.per_step == pytest.approx(time.step_s / 3600 * 7.2, abs=1e-6)
    assert planned("Qwen2.5-0.5B", "2xH100").cost is None


def test_a_job_of_unknown_steps_has_the_price_of_one() -> None:
    epochs = job(steps=0, data={"train": "x", "epochs": 1})
    plan = planned("Qwen2.5-0.5B", "1xA100-80GB", epochs, price_per_hour=2.0)
    assert plan.cost is not None and plan.cost.total is None and plan.cost.per_step > 0


def test_a_job_that_only_evaluates_is_not_planned() -> None:
    evaluates = job(steps=0, data={"eval": "x"})
    with pytest.raises(UnknownModelSize, match="steps is 0: the job only evaluates"):
        planned("Qwen2.5-0.5B", "1xA100-80GB", evaluates)
