"""DeepSpeed's configuration, and what a job may say about it; how a batch is dealt; what is said
when memory runs out."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from deepspeed.comm.torch import build_shm_op

from services.trainer.learning.batch import deal
from services.trainer.zero.internals import random_state, restore_random_state
from services.trainer.zero.memory import (
    MemoryPlan,
    first_line,
    is_out_of_memory,
    knobs,
    usage,
)
from services.trainer.zero.stages import DECAYS, config, step
from services.trainer.zero.state import SavedFragments
from shared.errors import BadRequest, Conflict
from shared.plan.memory import Ranks
from shared.wire import Example, Optimization
from tests.support.engine_ranks import a_job
from tests.support.plan_models import job as plan_job
from tests.support.plan_models import model


def settings(memory: dict | None = None, dtype: torch.dtype = torch.float32) -> dict:
    return config(
        a_job("m", memory=memory, training={"max_grad_norm": 0.5}), dtype, num_trainable=1001
    )


class StageZero:
    """DeepSpeed's engine at stage 0, as far as `step` asks it."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.module = torch.nn.ParameterList([torch.zeros_like(gradient)])
        self.module[0].grad = gradient
        self.optimizer = torch.optim.AdamW([{"params": [*self.module], DECAYS: True}])

    def zero_optimization_stage(self) -> int:
        return 0

    def step(self) -> None:
        pass


def test_at_stage_0_the_norm_keeps_what_is_small_beside_a_few_large_elements():
    """64 squares of 2^12 and n of 1 add up to 2^30 + n, with n = 2^20 + 2^8 to (2^15 + 16)^2. To
    2^24, which is what each lane of a processor begins with, float32 adds 1 in vain."""
    ones = 2**20 + 2**8
    gradient = torch.cat([torch.full((64,), 4096.0), torch.ones(ones)])
    norm = step(StageZero(gradient), Optimization(learning_rate=0.1, max_grad_norm=16392.0))
    assert norm == pytest.approx(32784, rel=1e-7)
    assert gradient[0].item() == pytest.approx(2048, rel=1e-6)  # scaled down to half the norm
    assert gradient[-1].item() == pytest.approx(0.5, rel=1e-6)


def test_nothing_is_compiled_before_a_job_asks_for_it():
    assert build_shm_op() is None


def test_a_jobs_deepspeed_settings_are_merged_key_by_key():
    merged = settings(
        {
            "zero_stage": 3,
            "deepspeed": {
                "zero_optimization": {"overlap_comm": True},
                "wall_clock_breakdown": True,
            },
        }
    )
    assert merged["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 1001,
        "allgather_bucket_size": 1002,
        "overlap_comm": True,
    }
    assert merged["wall_clock_breakdown"] is True
    assert merged["gradient_clipping"] == 0.5
    assert merged["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        (
            {"gradient_accumulation_steps": 4},
            "sets gradient_accumulation_steps to 4, .*; use memory.micro_batch_tokens",
        ),
        (
            {"zero_optimization": {"stage": 1}},
            "sets zero_optimization.stage to 1, .*; use memory.zero_stage",
        ),
        ({"bf16": {"enabled": True}}, "sets bf16 to .*; use training.dtype"),
        (
            {"flops_profiler": {"enabled": True, "output_file": "/etc/cron.d/x"}},
            "sets flops_profiler.output_file to '/etc/cron.d/x', .*may not name files to write",
        ),
        (
            {"zero_optimization": {"offload_param": {"nvme_path": "/srv"}}},
            "sets zero_optimization.offload_param.nvme_path to '/srv', .*may not name folders",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "sets zero_optimization.offload_optimizer.device to 'nvme', .*; use "
            "memory.offload_optimizer",
        ),
        ({"zero_optimization": 2}, "sets zero_optimization to 2, expected a table"),
        ({"gradient_predivide_factor": 2.0}, "sets gradient_predivide_factor to 2.0, .*divided"),
        ({"prescale_gradients": True}, "sets prescale_gradients to True, .*divided"),
        ({"gradient_allreduce_op": "sum"}, "sets gradient_allreduce_op to 'sum', .*divided"),
        ({"communication_data_type": "bf16"}, "sets communication_data_type .*in float32"),
        ({"gradient_clipping": 9.0}, "sets gradient_clipping .*; use training.max_grad_norm"),
        ({"curriculum_learning": {"enabled": True}}, "sets curriculum_learning .*/train_step"),
        ({"compression_training": {}}, "sets compression_training .*may change what is computed"),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "sets zero_optimization.zero_quantized_gradients to True, .*may change",
        ),
    ],
)
def test_what_another_setting_says_is_not_taken_from_deepspeeds(over, sentence):
    with pytest.raises(BadRequest, match=f"memory.deepspeed {sentence}"):
        settings({"deepspeed": over})


def test_the_optimizer_is_offloaded_with_zero_only():
    assert (
        settings({"offload_optimizer": True, "zero_stage": 1})["zero_optimization"][
            "offload_optimizer"
        ]["device"]
        == "cpu"
    )
    with pytest.raises(
        BadRequest, match=r"memory\.offload_optimizer needs memory\.zero_stage 1, 2 or 3, got 0"
    ):
        settings({"offload_optimizer": True, "zero_stage": 0})


def some(num: int) -> list[Example]:
    return [
        Example(prompt_token_ids=(i,), token_ids=(i,), old_logprobs=(0.0,), advantage=0.0)
        for i in range(num)
    ]


def test_every_example_is_dealt_once_into_shares_of_about_one_size_and_always_alike():
    examples = some(11)
    shares = deal(examples, 4, seed=3)
    assert sorted(len(share) for share in shares) == [2, 3, 3, 3]
    dealt = sorted(tuple(e.token_ids) for share in shares for e in share)
    assert dealt == [tuple(e.token_ids) for e in examples]
    assert shares == deal(examples, 4, seed=3) != deal(examples, 4, seed=4)
    assert deal(examples, 1, seed=3) == [examples]
    assert [len(share) for share in deal(some(2), 4, seed=3)] == [1, 1], "no share is empty"


def test_the_plan_of_a_pass_follows_its_tokens_and_not_the_longest_answer():
    planned = MemoryPlan(model("Qwen2.5-0.5B"), Ranks(1, 4, "cpu"))
    sizes = [
        planned.peak_bytes(plan_job(sampling={"max_tokens": max_tokens}), 2048)
        for max_tokens in (512, 16_384)
    ]
    assert sizes[0] == sizes[1]


def test_out_of_memory_names_the_settings_that_help_with_numbers():
    job = a_job("m", memory={"gradient_checkpointing": False})
    assert knobs(job, 2, (8, 12_000)) == (
        "memory.micro_batch_tokens from 16384 to 6000; memory.chunk_tokens from 1024 to 512; "
        "memory.gradient_checkpointing from false to true; memory.zero_stage from 2 to 3; "
        "memory.offload_optimizer from false to true; [lora], which trains adapters only"
    )
    # A row may have more tokens than the limit, and half of it too: no limit is raised.
    job = a_job("m", memory={"micro_batch_tokens": 64})
    assert knobs(job, 2, (18, 142)).startswith("memory.micro_batch_tokens from 64 to 32; ")
    memory = {"micro_batch_tokens": 1000, "chunk_tokens": 1, "zero_stage": 3}
    job = a_job("m", memory={**memory, "offload_optimizer": True}, lora={"rank": 4})
    assert (
        knobs(job, 2, (1, 1500))
        == "sampling.max_tokens: a micro-batch was one sequence of 1500 tokens already"
    )


def test_out_of_memory_says_what_was_planned_and_what_would_be_saved():
    planned = MemoryPlan(model("Qwen2.5-0.5B"), Ranks(2, 2, "gpu"))
    job = plan_job(memory={"micro_batch_tokens": 32_768})
    # GiB: half of 1.84 and of 5.52 on each of two ranks; twice 1.977 with 0.18 of
    # attention's kernel, and 0.5 + 0.76 + 2 x 0.109. Beside the last layer there is the head's
    # gradient, 0.25, and nothing else of logits
    assert planned.sentence(job) == (
        "planned are 11.48 GiB for each rank (weights 0.92, gradients 0.92, optimizer 2.76, "
        "activations 4.13, logits 1.48, buffers 1.49, overhead 1.00)"
    )
    # half of the activations: 1.977
    half = "memory.micro_batch_tokens from 32768 to 16384 (1.98 GiB less); "
    turns = knobs(job, 2, (32, 32_768), planned)
    # offloaded: 2.76, but for the largest gradient on its way, 0.25; a tile of the output head has
    # 2^26 logits of 512 tokens already, and ZeRO-3 gathers all that it shares out
    offload = "memory.offload_optimizer from false to true (2.51 GiB less); "
    assert turns.startswith(f"{half}{offload}[lora], which trains adapters only (")


def test_offloading_is_planned_with_the_stage_that_it_needs():
    planned = MemoryPlan(model("Qwen2.5-0.5B"), Ranks(1, 2, "gpu"))
    turns = knobs(plan_job(memory={"zero_stage": 0}), 1, None, planned)
    # 5.52 and no more of it; buffers of 8 x 200,000,000 and 2 x 136,134,656 come with ZeRO: 1.74
    wanted = "memory.offload_optimizer from false to true with memory.zero_stage 2 (3.78 GiB less)"
    assert wanted in turns


def test_where_the_plan_is_too_coarse_to_tell_every_setting_is_named():
    sizes = {"num_layers": 2, "hidden": 8, "intermediate": 8, "heads": 1, "kv_heads": 1}
    sizes |= {"head_size": 8, "vocabulary": 64, "shapes": {"w": (64, 64)}}
    tiny = dataclasses.replace(model("Qwen2.5-0.5B"), **sizes)
    job = plan_job(memory={"gradient_checkpointing": False, "micro_batch_tokens": 1000})
    turns = knobs(job, 1, None, MemoryPlan(tiny, Ranks(1, 4, "cpu")), device="cpu")
    assert "memory.chunk_tokens from 1024 to 512" in turns and "offload" not in turns


def test_on_a_cpu_the_optimizer_has_no_other_memory_to_go_to():
    for planned in (MemoryPlan(model("Qwen2.5-0.5B"), Ranks(1, 4, "cpu")), None):
        turns = knobs(plan_job(), 1, (8, 16_384), planned, device="cpu")
        assert "micro_batch_tokens" in turns and "offload_optimizer" not in turns


def test_a_full_memory_is_told_from_other_errors():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    for library in ("CUBLAS", "CUDNN"):  # torch raises RuntimeError for what they cannot allocate
        message = f"CUDA error: {library}_STATUS_ALLOC_FAILED when calling `create(handle)`"
        assert is_out_of_memory(RuntimeError(message))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert is_out_of_memory(raised.value)
    assert "1152921504606846976" in first_line(raised.value) or "4611686018427387904" in first_line(
        raised.value
    )
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(RuntimeError("NCCL error: unhandled cuda error, out of memory"))


def test_usage_of_this_host_is_in_gibibytes():
    assert usage(torch.device("cpu")).startswith("of ") and "this rank takes 0.00" not in usage(
        torch.device("cpu")
    )


# --- state that comes back as it was -------------------------------------------------------------


def draw() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.rand(()).item()


def test_random_numbers_continue_where_they_were(tmp_path):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()  # half of a pair of normals is kept by Python and by numpy
    torch.save(random_state(), tmp_path / "state.pt")
    expected = [draw() for _ in range(3)]
    draw()
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_what_another_version_wrote_is_no_other_model(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    with pytest.raises(Conflict, match="no optimizer state that this version of Hone reads"):
        SavedFragments.of(tmp_path)
