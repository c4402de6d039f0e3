"""Where a job fits, how long its steps take, which change makes it fit, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import BadRequest
from shared.job import Job
from shared.plan.gpus import parse_gpus
from shared.plan.model import UnknownModelSize
from shared.plan.planning import make_plan
from shared.plan.rates import PlanInput, passes, rates_of, sample_s, sync_s, train_s
from shared.settings import Settings
from shared.wire import MetricsRow, Plan, PromptLengths
from tests.support.plan_models import job, model


def planned(name: str, gpus: str, wanted: Job | None = None, **settings: Any) -> Plan:
    known = PromptLengths(longest=512, is_all=True)
    return make_plan(wanted or job(), model(name), Settings(**settings), parse_gpus(gpus), known)


def kinds(plan: Plan) -> list[tuple[str, int, int, int, bool]]:
    every = (plan.placement, *plan.others)
    return [(p.kind, p.trainer_ranks, p.num_samplers, p.tensor_parallel, p.fits) for p in every]


def test_a_small_model_and_its_sampler_take_turns_on_a_small_gpu() -> None:
    wanted = job(memory={"micro_batch_tokens": 24_576})
    plan = planned("Qwen2.5-0.5B", "1xA10G-24GB", wanted)
    assert plan.fits and plan.placement.settings == {
        "HONE_COLOCATE": "1",
        "HONE_TRAINER_RANKS": "1",
    }
    # 14.2 GiB for the trainer: 0.95 x 22 - 1 has room for it, what a sampler leaves has not
    assert kinds(plan) == [("turns", 1, 1, 1, True), ("shared", 1, 1, 1, False)]
    assert plan.others[0].why_not == ("the trainer needs 14.2 GiB on each GPU and has 13.2",)


def test_a_job_that_samples_ahead_does_not_take_turns() -> None:
    plan = planned("Qwen2.5-0.5B", "1xA100-80GB", job(max_staleness=1))
    assert [kind for kind, *_ in kinds(plan)] == ["shared"]


def test_all_ways_to_deal_out_gpus_are_tried_and_the_fastest_is_chosen() -> None:
    plan = planned("Qwen2.5-7B", "4xH100")
    times = [p.time.step_s for p in (plan.placement, *plan.others) if p.time]
    assert times == sorted(times)
    assert sorted(kind[:4] for kind in kinds(plan)) == [
        ("split", 1, 3, 1),
        ("split", 2, 2, 1),
        ("split", 3, 1, 1),
        ("turns", 4, 1, 4),
    ]
    # a rank that is alone holds 139 GiB, of two each 83
    assert [kind[0] for kind in kinds(plan) if not kind[4]] == ["split", "split"]


def test_a_model_too_large_for_a_samplers_gpu_is_split_over_as_few_as_hold_it() -> None:
    plan = planned("Llama-3.1-8B", "8xA100-80GB,4xA10G")
    # 15 GiB of weights and 16 of the cache for its 131,072 tokens: more than 18.7, less over 2
    assert kinds(plan) == [("split", 8, 2, 2, True)]
    assert plan.placement.settings["HONE_TENSOR_PARALLEL_SIZE"] == "2"


def test_on_a_cpu_both_are_in_the_hosts_memory() -> None:
    plan = planned("Qwen2.5-0.5B", "cpu", kv_cache_gib=1)
    assert plan.placement.kind == "cpu" and plan.placement.time is None
    sampler = plan.placement.sampler
    assert plan.placement.sampler_room_gib == sampler.weights_gib + sampler.overhead_gib + 1
    assert "the time of a step is not estimated: there are no rates for cpu" in plan.notes


def test_prompts_of_an_unknown_length_are_said_to_be_guessed() -> None:
    plan = make_plan(job(), model("Qwen2.5-0.5B"), Settings(), parse_gpus("1xH100"))
    assert plan.prompt_tokens == 512
    assert plan.notes[0] == "prompts are taken to be of 512 tokens (--prompt-tokens)"
    why = PromptLengths(why_not="there is no file 'x'")
    plan = make_plan(job(), model("Qwen2.5-0.5B"), Settings(), parse_gpus("1xH100"), why)
    assert plan.notes[0].endswith(" of 512 tokens (--prompt-tokens): there is no file 'x'")
    short = job(max_model_len=600)
    plan = make_plan(short, model("Qwen2.5-0.5B"), Settings(), parse_gpus("1xH100"))
    assert plan.prompt_tokens == 88


def test_what_the_model_does_not_hold_is_no_plan() -> None:
    short = {"max_tokens": 512}
    with pytest.raises(BadRequest, match=r"prompts of 512 tokens leave no room for .* holds 1023"):
        planned("Qwen2.5-0.5B", "1xH100", job(max_model_len=1023, sampling=short))
    dropped = job(max_model_len=1023, sampling={**short, "overlong_prompts": "drop"})
    assert planned("Qwen2.5-0.5B", "1xH100", dropped).prompt_tokens == 511
    assert planned("Qwen2.5-0.5B", "1xH100", job(max_model_len=1024, sampling=short)).fits
    for known in (PromptLengths(), PromptLengths(longest=1, is_all=True)):
        with pytest.raises(BadRequest, match=r"max_tokens is 512, .* expected at most 511"):
            make_plan(
                job(max_model_len=512, sampling=short),
                model("Qwen2.5-0.5B"),
                Settings(),
                parse_gpus("1xH100"),
                known,
            )


def test_the_samplers_share_leaves_room_for_the_weights_that_stay() -> None:
    wanted = job(lora={"rank": 16}, max_model_len=2048)
    plan = planned("Llama-3.1-8B", "1xA100-40GB", wanted)
    # 15.0 GiB of weights and 1 of overhead, of 39.4: 59 % are left
    assert plan.placement.settings["HONE_GPU_MEMORY_UTILIZATION"] == "0.59"
    assert plan.fits and plan.placement.kind == "turns"
    fixed = planned("Llama-3.1-8B", "1xA100-40GB", wanted, gpu_memory_utilization=0.7)
    assert "the trainer keeps 16.0 GiB while the sampler has 27.6" in fixed.placement.why_not[-1]


def test_optimizer_states_that_cannot_be_moved_stay_beside_the_sampler() -> None:
    # 0.92 of weights, 1 of overhead, and 12 bytes of each parameter, 5.52; at stage 1 6 more
    for stage, stays in ((0, 7.44), (1, 10.2), (2, 1.92)):
        wanted = job(memory={"zero_stage": stage}, max_model_len=2048)
        plan = planned("Qwen2.5-0.5B", "1xA10G", wanted, gpu_memory_utilization=0.93)
        (turns,) = (p for p in (plan.placement, *plan.others) if p.kind == "turns")
        assert f"the trainer keeps {stays:.1f} GiB while" in turns.why_not[-1]


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
        pools = parse_gpus("1xH100")
        plan = make_plan(wanted, model("Qwen2.5-0.5B"), Settings(), pools, known)
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


# what makes it fit


def changes(plan: Plan) -> dict[str, str]:
    return {change.key: change.value for change in plan.changes}


def test_the_changes_named_make_the_job_fit() -> None:
    plan = planned("Qwen2.5-7B", "1xA100-80GB")
    assert not plan.fits
    # 14.2 of weights, 28.4 of gradients, 9.2 of a micro-batch, 2.5 of buffers and 1
    assert changes(plan) == {"memory.offload_optimizer": "true"}
    assert plan.enough == ("4xA100-80GB", "1xB200")
    again = planned("Qwen2.5-7B", "1xA100-80GB", job(memory={"offload_optimizer": True}))
    assert again.fits and again.changes == ()


def test_an_8b_with_its_optimizer_elsewhere_needs_more_than_40_gib() -> None:
    plan = planned("Llama-3.1-8B", "1xA100-40GB", job(memory={"offload_optimizer": True}))
    # 14.96 of weights, 29.92 of gradients, 8.38 of a micro-batch and 0.98 of the head's gradient,
    # 1.49 + 0.98, 0.78 of attention's kernel, and 1
    assert not plan.fits
    assert plan.placement.trainer.peak_gib == pytest.approx(58.48, abs=0.01)


def test_on_a_cpu_the_hosts_memory_is_no_way_out_of_the_hosts_memory() -> None:
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"):
        assert "memory.offload_optimizer" not in changes(planned(name, "cpu"))


def test_the_cheapest_change_is_named_first() -> None:
    # 24 layers of 57,344 bytes for 16,384 tokens are 22 GiB: half of that is enough
    wanted = job(memory={"gradient_checkpointing": False})
    plan = planned("Qwen2.5-0.5B", "1xA100-40GB", wanted)
    assert plan.fits
    plan = planned("Qwen2.5-0.5B", "1xA10G", wanted)
    assert changes(plan) == {"memory.micro_batch_tokens": "4096"}
    # one sequence of 1,024 tokens is the least
    longer = job(memory={"gradient_checkpointing": False}, sampling={"max_tokens": 15_000})
    plan = planned("Qwen2.5-0.5B", "1xA10G", longer)
    assert changes(plan) == {"memory.gradient_checkpointing": "true"}


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


def test_a_cache_for_the_longest_sequence_is_made_smaller_by_max_model_len() -> None:
    plan = planned("Llama-3.1-8B", "1xH100,1xA10G", job(lora={"rank": 16}))
    # 15 GiB of weights leave no room on 0.85 x 22 for 131,072 tokens of 128 KiB
    assert changes(plan)["max_model_len"] == "1024"
    assert "sampler needs" in plan.placement.why_not[0]


def test_max_model_len_is_not_cut_by_a_guess() -> None:
    pools, settings = parse_gpus("1xH100,1xA10G"), Settings()
    for known in (PromptLengths(), PromptLengths(longest=512, num=9)):
        plan = make_plan(job(lora={"rank": 16}), model("Llama-3.1-8B"), settings, pools, known)
        assert not plan.fits and "max_model_len" not in changes(plan)
    said = "the longest of 9 prompts that were counted has 512 tokens; there may be longer ones"
    assert said in plan.notes
    known = PromptLengths(longest=512, num=9, is_all=True)
    plan = make_plan(job(lora={"rank": 16}), model("Llama-3.1-8B"), settings, pools, known)
    assert changes(plan)["max_model_len"] == "1024"
    assert "the longest of all 9 prompts has 512 tokens" in plan.notes


def test_max_model_len_has_room_for_the_completions_of_evaluations() -> None:
    wanted = job(lora={"rank": 16}, evaluation={"max_tokens": 2000})
    plan = planned("Llama-3.1-8B", "1xH100,1xA10G", wanted)
    assert changes(plan)["max_model_len"] == "2512"


def test_what_is_learned_changes_last() -> None:
    # with the optimizer elsewhere and the smallest micro-batches 20.97 GiB, of 0.95 x 22
    plan = planned("Llama-3.1-8B", "1xA10G,1xH100")
    assert [change.key for change in plan.changes if change.learned] == ["lora.rank"]
    again = job(lora={"rank": 16}, memory={"micro_batch_tokens": 4096})
    assert planned("Llama-3.1-8B", "1xA10G,1xH100", again).fits


def test_where_nothing_is_enough_nothing_is_promised() -> None:
    plan = planned("Llama-3.1-8B", "1xT4")
    # of the single GPUs the largest has room for its 150 GiB
    assert (plan.changes, plan.enough) == ((), ("1xB200",))
    plan = planned("Llama-3.1-8B", "1xT4", job(memory={"zero_stage": 1}))
    assert (plan.changes, plan.enough) == ((), ())


# how long


def step_of(**sections: Any) -> PlanInput:
    """Returns 64 completions of 100 tokens after 50, 8 to a prompt."""
    wanted = job(**({"sampling": {"prompts_per_step": 8, "group_size": 8}} | sections))
    return PlanInput(wanted, model("Qwen2.5-1.5B"), 50, 100, Settings())


def test_a_steps_time_is_as_worked_out_by_hand() -> None:
    """1.5B on two A100-80GB: 64 completions of 100 tokens after 50, 8 to a prompt."""
    count = 1_543_714_304
    needs, (pool,) = step_of(), parse_gpus("1xA100-80GB")
    # an iteration reads 2 x 1.54e9 bytes of weights and 32 x 100 tokens of 28,672 bytes of cache,
    # at 0.6 x 2039e9 per second: 2.6 ms, and 5 ms; 2 x 100 of them; then 8 prompts of 50 tokens
    read_s = (2 * count + 32 * 100 * 28_672) / (0.6 * 2039e9)
    prompts_s = 2 * count * 8 * 50 / (0.5 * 312e12)
    sampled_s = 200 * (read_s + 0.005) + prompts_s
    assert sample_s(needs, pool.gpu, 1, 1, 32) == pytest.approx(sampled_s, abs=1e-3)
    # 4 passes (checkpointing is on) over 64 x 100 tokens after 8 prompts of 50, of 2 x 1.54e9 each;
    # and 2 x 28 x 12 x 128 for each token and each one that it sees, twice their mean
    seen = 64 * (150 * 150 - 50 * 50) + 8 * 50 * 50
    operations = 2 * count * (64 * 100 + 8 * 50) + 2 * 28 * 12 * 128 * seen
    trained_s = 4 * operations / (0.35 * 312e12)
    assert train_s(needs, pool, "split") == pytest.approx(trained_s, abs=1e-3)
    assert sync_s(needs, pool.gpu) == pytest.approx(2 * count / 5e9, abs=1e-3)


def test_time_is_by_the_number_of_updates_and_by_the_samplers_own_dtype() -> None:
    (pool,) = parse_gpus("1xA100-80GB")

    def time(**sections: Any) -> float:
        return train_s(step_of(**sections), pool, "split")

    # 1,543,714,304 parameters at 1e9 per second: 1.544 s for each of the updates after the first,
    # and a pass more of the model, a fourth of the 4 that the one update takes, beside its Adam.
    # Nothing is shared, or three minibatches would have most prompts three times.
    off = {"memory": {"offload_optimizer": True, "shared_prefix": "off"}}
    one, several = time(**off), time(training={"minibatches": 3}, **off)
    a_pass = (one - 1.544) / 4
    assert several == pytest.approx(one + 2 * 1.544 + a_pass, abs=5e-3)
    # at 19.5e12 products per second those of 32 sequences take longer than reading the weights:
    # 2 x 100 iterations of 10.1 and 5 ms, and 8 prompts of 50 tokens
    products_s = 2 * 1_543_714_304 * (200 * 32 + 400) / (0.5 * 19.5e12)
    single = sample_s(step_of(training={"dtype": "float32"}), pool.gpu, 1, 1, 32)
    assert single == pytest.approx(products_s + 200 * 0.005, abs=1e-3)


def test_prompts_count_once_for_each_minibatch_with_some_of_their_group() -> None:
    (pool,) = parse_gpus("1xA100-80GB")

    def time(**sections: Any) -> float:
        return train_s(step_of(**sections), pool, "split")

    # Attention apart 64 x 100 + 8 x 50 tokens, in 4 passes; 64 x 150 with nothing shared; and in 2
    # minibatches 64 x 100 + 8 x 50 x 2 (1 - 1 / 2^8), in 5 passes.
    once = time()
    off = time(memory={"shared_prefix": "off"})
    assert off / once == pytest.approx(9600 / 6800, rel=2e-3)
    assert time(memory={"packing": "off"}) == time(memory={"attention": "eager"}) == off
    assert time(memory={"attention": "flash_attention_2"}) == off
    assert time(memory={"attention": "sdpa"}) == once
    twice = time(training={"minibatches": 2})
    assert twice / once == pytest.approx(5 * 7196.9 / (4 * 6800), rel=2e-3)
    assert time(memory={"packing": "off", "shared_prefix": "on"}) == once


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
    assert passes(job(**sections)) == count


def test_sampling_ahead_hides_the_shorter_of_sampling_and_training() -> None:
    plan = planned("Qwen2.5-0.5B", "2xA100-80GB", job(max_staleness=1))
    time = plan.placement.time
    assert time is not None and plan.placement.kind == "split"
    longer = max(time.sample_s, time.train_s)
    assert time.step_s == pytest.approx(longer + time.sync_s, abs=2e-3)


def test_a_runs_rates_take_the_place_of_the_tabled_ones() -> None:
    wanted = job(sampling={"prompts_per_step": 4, "group_size": 8})
    row = {"time/generate": 2.0, "time/train": 4.0, "time/sync": 0.5}
    row |= {"completions/mean_length": 100.0, "num_tokens": 3000.0}
    rows = [MetricsRow(step=step, metrics=row) for step in (1, 2, 3)]
    rows.append(MetricsRow(step=4, metrics={"replayed": 1.0}))
    found = rates_of(rows, wanted)
    assert found is not None
    # 32 completions of 100 tokens were sampled in 2 s, and took the trainer 4 s
    assert (found.sampled_per_s, found.trained_per_s, found.sync_s) == (1600, 800, 0.5)
    plan = make_plan(
        job(),
        model("Qwen2.5-0.5B"),
        Settings(),
        parse_gpus("cpu"),
        measured=found,
    )
    time = plan.placement.time
    # 256 completions of 100 tokens
    assert time is not None and (time.sample_s, time.train_s) == (16.0, 32.0)
    assert (time.step_s, time.source) == (48.5, "measured")
    assert rates_of(rows[3:], wanted) is None
    ahead = rates_of(rows, wanted.model_copy(update={"max_staleness": 1}))
    plan = make_plan(
        job(),
        model("Qwen2.5-0.5B"),
        Settings(),
        parse_gpus("cpu"),
        measured=ahead,
    )
    assert any("sampled ahead (max_staleness)" in note for note in plan.notes)


# how much


def test_the_cost_is_hours_by_the_price_of_all_gpus() -> None:
    plan = planned("Qwen2.5-0.5B", "2xH100", price_per_hour=7.2, currency="EUR")
    time, cost = plan.placement.time, plan.cost
    assert time is not None and cost is not None
    assert (cost.currency, cost.per_hour, cost.source) == ("EUR", 7.2, "HONE_PRICE_PER_HOUR")
    assert cost.hours == pytest.approx(100 * time.step_s / 3600, abs=1e-4)
    assert cost.total == pytest.approx(100 * time.step_s / 3600 * 7.2, abs=1e-3)
    assert cost.per_step == pytest.approx(time.step_s / 3600 * 7.2, abs=1e-6)


def test_a_job_of_unknown_steps_has_the_price_of_one() -> None:
    epochs = job(steps=0, data={"train": "x", "epochs": 1})
    plan = planned("Qwen2.5-0.5B", "1xA100-80GB", epochs)
    assert plan.cost is not None and plan.cost.total is None and plan.cost.per_step > 0
    assert any("data.epochs" in note for note in plan.notes)


def test_a_job_that_only_evaluates_is_not_planned() -> None:
    evaluates = job(steps=0, data={"eval": "x"})
    with pytest.raises(UnknownModelSize, match="steps is 0: the job only evaluates"):
        planned("Qwen2.5-0.5B", "1xA100-80GB", evaluates)


def test_gpus_without_a_price_are_said_to_have_none() -> None:
    plan = planned("Qwen2.5-0.5B", "1xRTX-4090")
    assert plan.fits and plan.cost is None
    assert any("no price is known for these GPUs" in note for note in plan.notes)
