"""The rates of this machine's processor: measured once, and how they become those of a plan."""

from __future__ import annotations

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.plan import gpus
from shared.plan.gpus import (
    CoreRates,
    CpuRates,
    Gpu,
    GpuGroup,
    count_cores,
    measure_in_process,
    parse_gpus,
    with_rates,
)
from shared.plan.planning import make_plan
from shared.settings import Settings
from shared.wire import PromptLengths
from tests.support.plan_models import job, model

CORE = CoreRates(float32_tflops=0.1, bandwidth_gb_s=20.0)
TRAINING_SHARE = 0.7
POOLS = (GpuGroup(1, Gpu("cpu", 64.0)),)


@pytest.mark.parametrize(
    ("flags", "bfloat16"),
    [
        ("fma avx2 avx512f avx512_bf16 amx_bf16", 3.2),
        ("fma avx2 avx512f avx512_bf16", 0.8),
        ("fma avx2 avx512f", 0.16),
        ("fma avx2", 0.08),
    ],
)
def test_cores_multiply_and_bfloat16_is_as_fast_as_the_flags_say(
    flags: str, bfloat16: float
) -> None:
    found = with_rates(POOLS[0].gpu, CORE, 4, flags)
    assert found.has_rates and found.bandwidth_gb_s == 20.0
    assert (found.tflops(4), found.tflops(2)) == pytest.approx((0.4, bfloat16))


def test_hyperthreads_of_a_core_are_one_and_a_container_has_its_quota(tmp_path: Path) -> None:
    cpuinfo, quota = tmp_path / "cpuinfo", tmp_path / "cpu.max"
    block = "processor\t: {}\nphysical id\t: 0\ncore id\t\t: {}\nflags\t\t: fma\n\n"
    cpuinfo.write_text(block.format(0, 0) + block.format(1, 0))  # processor 0 is always there
    assert count_cores(cpuinfo, tmp_path / "none") == 1
    quota.write_text("50000 100000\n")
    assert count_cores(cpuinfo, quota) == 0.5
    quota.write_text("max 100000\n")
    assert count_cores(cpuinfo, quota) == 1


def test_requests_at_once_share_one_measurement() -> None:
    running, calls = threading.Lock(), list[int]()

    def measure() -> CoreRates:
        assert running.acquire(blocking=False)
        time.sleep(0.05)
        calls.append(1)
        running.release()
        return CORE

    rates = CpuRates(measure)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(rates.pools, [POOLS] * 8))
    assert len(calls) == 1 and all(pools[0].gpu.bandwidth_gb_s == 20.0 for pools in found)


def test_a_failed_measurement_leaves_plans_without_times_and_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([subprocess.TimeoutExpired("python", 20.0), CORE])

    def measure() -> CoreRates:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    rates = CpuRates(measure)
    pools = rates.pools(POOLS)
    assert pools == rates.pools(POOLS), "a measurement may take 20 s"
    assert not pools[0].gpu.has_rates
    monkeypatch.setattr(gpus, "RETRY_S", 0.0)
    assert rates.pools(POOLS)[0].gpu.has_rates


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            subprocess.CalledProcessError(
                1, "python", stderr="Traceback\nModuleNotFoundError: No module named 'numpy'\n"
            ),
            "NumPy is missing. Install NumPy, or plan with --measured RUN",
        ),
        (
            subprocess.CalledProcessError(-9, "python", stderr=""),
            "Command 'python' died with <Signals.SIGKILL: 9>. Run `python -m shared.plan.gpus` to "
            "see it fail, or plan with --measured RUN",
        ),
        (
            subprocess.TimeoutExpired("python", 20.0),
            "it took longer than 20 s. Plan again in 10 minutes, when the machine has less to do, "
            "or plan with --measured RUN",
        ),
    ],
)
def test_a_plan_says_why_the_processor_was_not_measured_and_what_to_do(
    error: Exception, reason: str
) -> None:
    def measure() -> CoreRates:
        raise error

    pools = CpuRates(measure).pools(POOLS)
    plan = make_plan(job(), model("Qwen2.5-0.5B"), Settings(), pools)
    assert plan.placement.time is None
    (note,) = (note for note in plan.notes if "not estimated" in note)
    assert note == (
        "the time of a step is not estimated: the rates of this processor could not be measured: "
        + reason
    )


def test_gpus_are_not_measured() -> None:
    def measure() -> CoreRates:
        raise AssertionError

    pools = parse_gpus("1xH100,2xA10G")
    assert CpuRates(measure).pools(pools) is pools


def test_this_machine_is_measured_in_two_seconds_of_its_own_time() -> None:
    found = measure_in_process()
    # between a slow single-board computer and the fastest core there is
    assert 0.001 < found.float32_tflops < 1
    assert 0.1 < found.bandwidth_gb_s < 2000


def test_a_step_on_a_cpu_is_as_worked_out_by_hand() -> None:
    wanted = job(
        sampling={"prompts_per_step": 24, "group_size": 8, "max_tokens": 8},
        training={"dtype": "float32"},
    )
    gpu = with_rates(POOLS[0].gpu, CORE, 2, "avx512f avx512_bf16")
    pools = (GpuGroup(1, gpu),)
    plan = make_plan(
        wanted, model("Qwen2.5-0.5B"), Settings(), pools, PromptLengths(longest=37, is_all=True)
    )
    step = plan.placement.time
    assert step is not None and step.source == "benchmarked"
    # 494,032,768 parameters; 8 iterations of 192 tokens and 24 prompts of 37, at 0.3 x 0.2e12
    # operations per second, and 10 ms an iteration: reading the weights takes 0.16 s of each
    count = 494_032_768
    sampled_s = 2 * count * (8 * 192 + 24 * 37) / (0.3 * 0.2e12) + 0.08
    assert step.sample_s == pytest.approx(sampled_s, rel=1e-3)
    # 3 passes (it fits without checkpointing) over 24 x (37 + 8 x 8) tokens; attention is below 1 %
    assert not plan.placement.recomputes
    trained_s = 3 * 2 * count * 24 * (37 + 64) / (TRAINING_SHARE * 0.2e12)
    assert step.train_s == pytest.approx(trained_s, rel=1e-2)
    assert step.sync_s == pytest.approx(4 * count / 0.3e9, abs=1e-3)
    (note,) = (note for note in plan.notes if "measurement" in note)
    assert not any("price" in other for other in plan.notes)
    assert "200 GFLOP/s in float32, 20 GB/s" in note and "wrong by a factor of 2" in note
    shorter = wanted.model_copy(update={"max_staleness": 1})
    ahead = make_plan(
        shorter, model("Qwen2.5-0.5B"), Settings(), pools, PromptLengths(longest=37, is_all=True)
    )
    assert ahead.placement.time == step  # both need all cores, so nothing is hidden
    several = Settings(trainer_ranks=2, rollout_replicas=2)
    shared = make_plan(
        wanted, model("Qwen2.5-0.5B"), several, pools, PromptLengths(longest=37, is_all=True)
    )
    assert shared.placement.recomputes and shared.placement.time  # two ranks need more memory
    assert shared.placement.time.sample_s == step.sample_s  # they share the cores
    assert shared.placement.time.train_s == pytest.approx(4 / 3 * step.train_s, rel=1e-3)
