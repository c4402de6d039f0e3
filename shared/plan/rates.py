"""How long a step takes: from the GPUs' data sheets, from a short measurement of this machine's
processor (`gpus.py`), or from a measured run.

A plan counts operations as in arXiv 2001.08361, section 2.1: a token takes 2 for each parameter,
and 4 L A D for each token that it attends to (scores and values), n / 2 tokens on average, in a
model of L layers with A heads of size D. In a mixture of experts a token's own experts count; an
iteration reads the experts of all its tokens.

What share of the data sheet's figures a step reaches on a GPU is assumed. On a CPU, whose cores all
ranks and samplers share, it was measured on one machine (`CPU_SHARES`). `hone plan --measured RUN`
uses the rates of an earlier run instead.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.job import Job
from shared.job.running import MemorySpec
from shared.plan.gpus import Gpu, GpuGroup
from shared.plan.memory import cache_bytes_per_token, is_moved
from shared.plan.model import Model
from shared.settings import Settings
from shared.weights.architectures import choose_dtype
from shared.wire.jobs import MetricsRow
from shared.wire.records import PlacementKind as Kind
from shared.wire.records import StepTime, TimeSource


@dataclass(frozen=True)
class Shares:
    """What a step reaches of a device's rates: `bandwidth` when tokens are sampled; of the
    operations per second `sampling`, on prompts or on many sequences at once, and `training` (the
    model FLOPs utilization of an update). `iteration_s` are the sampler's seconds of scheduling in
    each iteration, `sync_bytes_per_s` the rate of publishing and loading weights."""

    bandwidth: float
    sampling: float
    training: float
    iteration_s: float
    sync_bytes_per_s: float


GPU_SHARES = Shares(
    bandwidth=0.6, sampling=0.5, training=0.35, iteration_s=0.005, sync_bytes_per_s=5e9
)
"""Assumed. Weights move by shared memory or from GPU to GPU."""

FLOAT32_CPU_SHARES = Shares(
    bandwidth=0.6, sampling=0.3, training=0.7, iteration_s=0.01, sync_bytes_per_s=0.3e9
)
CPU_SHARES = {4: FLOAT32_CPU_SHARES, 2: replace(FLOAT32_CPU_SHARES, training=0.45)}
"""By the bytes of a weight: in bfloat16 the products are twice as fast and the rest is not.
Measured with SmolLM2-135M on two cores of an AMD Zen 4 (docs/planning.md); a sync there includes
digests and the canary."""

MOVED_BYTES_PER_S = 20e9
"""Between a GPU and the host's memory."""

CPU_ADAM_PER_S = 1e9
"""Parameters that DeepSpeed's CPU Adam updates per second, with `memory.offload_optimizer`."""


@dataclass(frozen=True)
class PlanInput:
    """The input of a placement: a job, its model, the tokens of its prompts and completions, and
    the settings. Time is for `completion_tokens`, memory for `sampling.max_tokens`. `is_longest`:
    no prompt has more than `prompt_tokens`; else these are a guess."""

    job: Job
    model: Model
    prompt_tokens: int
    completion_tokens: int
    settings: Settings
    is_longest: bool = False

    @property
    def completions(self) -> int:
        """How many completions a step has."""
        return self.job.sampling.prompts_per_step * self.job.completions_per_prompt

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest prompt with its completion."""
        return self.prompt_tokens + self.job.sampling.max_tokens

    def rank_tokens(self, num_ranks: int) -> int | None:
        """Returns the most tokens of a rank before an update, a shared prompt once for its group;
        None where an environment's turns add to prompt and completion."""
        if self.job.environment is not None:
            return None
        shares = may_share(self.job.memory)
        prompts = self.job.sampling.prompts_per_step if shares else self.completions
        tokens = prompts * self.prompt_tokens + self.completions * self.job.sampling.max_tokens
        return math.ceil(tokens / num_ranks)

    def itemsize(self, gpu: Gpu) -> int:
        """Returns the bytes of a weight on such a GPU."""
        return 4 if self.dtype(gpu) == "float32" else 2

    def dtype(self, gpu: Gpu) -> str:
        return choose_dtype(
            self.job.training.dtype, capability=None, cpu_multiplies_bfloat16=gpu.has_bfloat16
        )


@dataclass(frozen=True)
class MeasuredRates:
    """A run's measured rates on its GPUs: completion tokens sampled and trained per second, the
    seconds of a sync, and the tokens of a completion. Medians over its steps. All sampled tokens
    count as trained: groups without signal take no training time in a similar run either.
    `overlapped`: it sampled several batches at once."""

    sampled_per_s: float
    trained_per_s: float
    sync_s: float
    completion_tokens: float
    overlapped: bool = False


def time_by_run(needs: PlanInput, found: MeasuredRates) -> StepTime:
    """Returns the time of a step at a run's measured rates."""
    tokens = needs.completions * needs.completion_tokens
    sample_s, train_s = tokens / found.sampled_per_s, tokens / found.trained_per_s
    is_beside = needs.job.max_staleness > 0
    return step_time(sample_s, train_s, found.sync_s, is_beside=is_beside, source="measured")


def rates_of(rows: Sequence[MetricsRow], job: Job) -> MeasuredRates | None:
    """Returns the measured rates of a run of `job` with these rows; None if no step both sampled
    and trained."""
    completions = job.sampling.prompts_per_step * job.completions_per_prompt
    needed = ("time/generate", "time/train", "completions/mean_length")
    steps = [row.metrics for row in rows if all(row.metrics.get(name, 0) > 0 for name in needed)]
    if not steps:
        return None

    def per_s(seconds: str) -> float:
        return statistics.median(
            completions * step["completions/mean_length"] / step[seconds] for step in steps
        )

    return MeasuredRates(
        sampled_per_s=per_s("time/generate"),
        trained_per_s=per_s("time/train"),
        sync_s=statistics.median(step.get("time/sync", 0.0) for step in steps),
        completion_tokens=statistics.median(step["completions/mean_length"] for step in steps),
        overlapped=job.max_staleness > 0,
    )


def passes(job: Job) -> int:
    """Returns how often each token goes through the model in a step. For each epoch 1 forward and 2
    backward (1 with LoRA), and 1 more with gradient checkpointing; 1 for the reference; 1 for the
    log-probs before the first update, if a batch has several updates or dropout."""
    training = job.training
    backward = 1 if job.lora else 2
    each = 1 + backward + bool(job.memory.gradient_checkpointing)
    dropout = job.lora is not None and job.lora.dropout > 0
    frozen = training.epochs * training.minibatches > 1 or dropout or training.objective == "dpo"
    return training.epochs * each + frozen + training.has_reference


def sample_s(needs: PlanInput, gpu: Gpu, num: int, split: int, at_most: int) -> float:
    """Returns the seconds of sampling on `num` samplers of `split` such GPUs, each of at most so
    many sequences at once: iterations that add one token to each sequence, and the prompts, each
    once for its group."""
    if needs.job.trains_without_sampling:
        return 0.0
    model, itemsize = needs.model, needs.itemsize(gpu)
    shares = _shares(gpu, itemsize)
    devices = 1 if gpu.is_cpu else num
    each = math.ceil(needs.completions / devices)
    at_once = max(1, min(each, at_most * (num // devices)))
    rate = shares.sampling * split * gpu.tflops(itemsize) * 1e12
    # an iteration reads all weights, and the cache of each sequence, which is half of its
    # completion on average
    length = needs.prompt_tokens + needs.completion_tokens / 2
    cache = at_once * length * cache_bytes_per_token(model, itemsize, split)
    bandwidth = shares.bandwidth * gpu.bandwidth_gb_s * 1e9
    read_s = (itemsize * model.num_read(at_once) / split + cache) / bandwidth
    iteration_s = max(read_s, 2 * model.num_read() * at_once / rate) + shares.iteration_s
    iterations = math.ceil(each / at_once) * needs.completion_tokens
    prompts = each / needs.job.completions_per_prompt * needs.prompt_tokens
    return iterations * iteration_s + 2 * model.num_read() * prompts / rate


def train_s(needs: PlanInput, ranks: GpuGroup, kind: Kind) -> float:
    """Returns the seconds of training on these ranks, with what is moved or updated elsewhere."""
    job, gpu, size = needs.job, ranks.gpu, needs.itemsize(ranks.gpu)
    devices = 1 if gpu.is_cpu else ranks.count
    flops = passes(job) * _forward_flops(needs)
    found = flops / (devices * _shares(gpu, size).training * gpu.tflops(size) * 1e12)
    trained = needs.model.num_trainable(job.lora) / ranks.count
    if job.memory.offload_optimizer:
        found += job.training.epochs * job.training.minibatches * trained / CPU_ADAM_PER_S
    elif kind == "turns" and is_moved(job.memory, size):
        # masters and Adam's moments go to the host's memory and come back
        found += 2 * 12 * trained / MOVED_BYTES_PER_S
    return found


def sync_s(needs: PlanInput, gpu: Gpu) -> float:
    """Returns the seconds in which weights, or adapters alone, get from such GPUs to samplers."""
    job, model, size = needs.job, needs.model, needs.itemsize(gpu)
    if job.trains_without_sampling:
        return 0.0
    synced = model.num_parameters if job.served_rank is None else model.num_trainable(job.lora)
    return size * synced / _shares(gpu, size).sync_bytes_per_s


def _shares(gpu: Gpu, itemsize: int) -> Shares:
    return CPU_SHARES[itemsize] if gpu.is_cpu else GPU_SHARES


def _forward_flops(needs: PlanInput) -> float:
    """Returns the operations of a forward pass over a step's tokens. A shared prompt counts once
    for each minibatch that has a completion of it: M (1 - (1 - 1 / M)^group) of M minibatches."""
    job, model, group = needs.job, needs.model, needs.job.completions_per_prompt
    attention = 2 * model.num_layers * model.heads * model.head_size

    def flops(tokens: int) -> float:  # 2 P n + 2 L A D n^2 of n tokens
        return tokens * (2 * model.num_read() + attention * tokens)

    prompt, whole = flops(needs.prompt_tokens), flops(needs.prompt_tokens + needs.completion_tokens)
    minibatches, prompts_per_group = job.training.minibatches, float(group)
    if may_share(job.memory):
        prompts_per_group = minibatches * (1 - (1 - 1 / minibatches) ** group)
    return needs.completions * (whole - prompt + prompt * prompts_per_group / group)


def may_share(memory: MemorySpec) -> bool:
    """Returns whether the job's keys let the trainer share prefixes, if its model can."""
    if memory.shared_prefix == "off" or (memory.packing, memory.shared_prefix) == ("off", "auto"):
        return False
    return memory.attention in ("auto", "sdpa")


def step_time(
    sample_s: float, train_s: float, sync_s: float, *, is_beside: bool, source: TimeSource
) -> StepTime:
    """Returns the time of a step. `is_beside`: sampling runs while the trainer trains."""
    step_s = (max(sample_s, train_s) if is_beside else sample_s + train_s) + sync_s
    return StepTime(
        sample_s=round(sample_s, 3),
        train_s=round(train_s, 3),
        sync_s=round(sync_s, 3),
        step_s=round(step_s, 3),
        source=source,
    )
