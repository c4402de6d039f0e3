"""How long a step takes: from the GPUs' data sheets, from a short measurement of this machine's
processor (`gpus.py`), or from a measured run.

A step has R = prompts x group completions of c tokens each (the longest allowed, or a measured
mean) after prompts of p tokens. S samplers have t GPUs each, and s sequences at once. The trainer
has N ranks, one GPU each. A GPU has F operations and W bytes per second. The model has P
parameters of b bytes, T of them trained, and L layers with A heads of size D.

    an iteration  max((b P / t + s (p + c / 2) k) / (w W), 2 P s / (f t F)) + i
                  reads all weights, and the cache of k bytes per token; adds one token to each
                  sequence
    sampling      ceil(R / S / s) c iterations, and 2 P p R / (group f t F S) for the prompts
    training      E (R (g(p + c) - g(p)) + Q g(p)) / (m N F)
                  g(n) = 2 P n + 2 L A D n^2 operations of a forward pass over n tokens
                  Q prompts are computed: R where the job's `[memory]` shares no prefix, else
                  R / group x M (1 - (1 - 1 / M)^group) in M minibatches, because a prompt is
                  computed in each minibatch that has a completion of it
                  E passes of the model: 1 forward and 2 backward (1 with LoRA), and 1 more with
                  gradient checkpointing, times `training.epochs`; 1 for the reference; 1 for the
                  log-probs before the first update, if a batch has several updates or dropout
    updating      T / N / 1e9 seconds for each update with `memory.offload_optimizer`
    moving        2 x 12 T / N / 20 GB/s, if both take turns on the same GPUs: master weights and
                  Adam's moments go to the host's memory and come back
    sync          b P / v; b T / v if only adapters are synced

i is 5 ms and v 5 GB/s on GPUs; 10 ms and 0.3 GB/s on a CPU. The shares w, f and m of a GPU's data
sheet are assumed. Those of a CPU (`CPU_SHARES`) were measured on one machine, and there N ranks and
S samplers share the cores, so N F and S F are F. `hone plan --measured RUN` takes a run's measured
rates.

Operations are counted as in arXiv 2001.08361, section 2.1: a token takes 2 for each parameter, and
4 L A D for each token that it attends to (scores and values), n / 2 tokens on average. In a mixture
of experts P counts the experts of one token; an iteration reads the experts of all its tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shared.job import Job
from shared.job.running import MemorySpec
from shared.plan.gpus import Gpu
from shared.plan.memory import cache_bytes_per_token, is_moved
from shared.plan.model import Model
from shared.wire.jobs import MetricsRow
from shared.wire.records import PlacementKind as Kind
from shared.wire.records import StepTime


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
class StepSize:
    """The size of a step: its completions, `group` for each prompt, and the tokens of a prompt and
    of a completion."""

    completions: int
    group: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class SamplingRate:
    """The samplers: how many, the GPUs of each, the sequences that each samples at once, and the
    bytes of a weight."""

    num: int
    tensor_parallel: int
    sequences: int
    gpu: Gpu
    itemsize: int


@dataclass(frozen=True)
class TrainingRate:
    """The trainer: its ranks, the GPU of each, and the bytes of a weight."""

    num_ranks: int
    gpu: Gpu
    itemsize: int


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


def time_by_rates(
    model: Model,
    job: Job,
    load: StepSize,
    sampling: SamplingRate,
    training: TrainingRate,
    kind: Kind,
) -> StepTime | None:
    """Returns the time of a step by the rates of the GPUs or of the CPU; None if one has none."""
    gpu, size, ranks = training.gpu, training.itemsize, training.num_ranks
    if not (gpu.has_rates and sampling.gpu.has_rates):
        return None
    trained, shares = model.num_trainable(job.lora), _shares(gpu, size)
    synced = trained if job.served_rank is not None else model.num_parameters
    flops = passes(job) * _forward_flops(model, job, load)
    devices = 1 if gpu.is_cpu else ranks
    train_s = flops / (devices * shares.training * gpu.tflops(size) * 1e12)
    if job.memory.offload_optimizer:
        num_updates = job.training.epochs * job.training.minibatches
        train_s += num_updates * trained / ranks / CPU_ADAM_PER_S
    elif kind == "turns" and is_moved(job.memory, size):
        train_s += 2 * 12 * trained / ranks / MOVED_BYTES_PER_S
    given = job.trains_without_sampling
    sample_s = 0.0 if given else _sample_s(model, load, sampling)
    beside = job.max_staleness > 0 and kind == "split"
    sync_s = 0.0 if given else size * synced / shares.sync_bytes_per_s
    step = _step(sample_s, train_s, sync_s, beside=beside)
    return step.model_copy(update={"source": "benchmarked"}) if gpu.is_cpu else step


def time_by_run(job: Job, load: StepSize, found: MeasuredRates) -> StepTime:
    """Returns the time of a step at a run's measured rates."""
    tokens = load.completions * load.completion_tokens
    sample_s, train_s = tokens / found.sampled_per_s, tokens / found.trained_per_s
    step = _step(sample_s, train_s, found.sync_s, beside=job.max_staleness > 0)
    return step.model_copy(update={"source": "measured"})


def rates_of(rows: Sequence[MetricsRow], job: Job) -> MeasuredRates | None:
    """Returns the measured rates of a run of `job` with these rows; None if no step both sampled
    and trained."""
    completions = job.sampling.prompts_per_step * job.completions_per_prompt
    needed = ("time/generate", "time/train", "completions/mean_length")
    steps = [row.metrics for row in rows if all(row.metrics.get(name, 0) > 0 for name in needed)]
    if not steps:
        return None
    lengths = [step["completions/mean_length"] for step in steps]
    return MeasuredRates(
        sampled_per_s=_median_rate(completions, steps, "time/generate"),
        trained_per_s=_median_rate(completions, steps, "time/train"),
        sync_s=statistics.median(step.get("time/sync", 0.0) for step in steps),
        completion_tokens=statistics.median(lengths),
        overlapped=job.max_staleness > 0,
    )


def _median_rate(completions: int, steps: Sequence[Mapping[str, float]], seconds: str) -> float:
    """Returns the median over steps of sampled tokens per second of the step's part `seconds`."""
    return statistics.median(
        completions * step["completions/mean_length"] / step[seconds] for step in steps
    )


def passes(job: Job) -> int:
    """Returns how often each token goes through the model in a step; a backward pass counts
    twice."""
    training = job.training
    backward = 1 if job.lora else 2
    each = 1 + backward + job.memory.gradient_checkpointing
    dropout = job.lora is not None and job.lora.dropout > 0
    frozen = training.epochs * training.minibatches > 1 or dropout or training.objective == "dpo"
    return training.epochs * each + frozen + training.has_reference


def _sample_s(model: Model, load: StepSize, sampling: SamplingRate) -> float:
    split, gpu, itemsize = sampling.tensor_parallel, sampling.gpu, sampling.itemsize
    shares = _shares(gpu, itemsize)
    devices = 1 if gpu.is_cpu else sampling.num
    each = math.ceil(load.completions / devices)
    at_once = max(1, min(each, sampling.sequences * (sampling.num // devices)))
    per_token = cache_bytes_per_token(model, itemsize, split)
    length = load.prompt_tokens + load.completion_tokens / 2
    read_s = (itemsize * model.num_read(at_once) / split + at_once * length * per_token) / (
        shares.bandwidth * gpu.bandwidth_gb_s * 1e9
    )
    rate = shares.sampling * split * gpu.tflops(itemsize) * 1e12
    computed_s = 2 * model.num_read() * at_once / rate
    iterations = math.ceil(each / at_once) * load.completion_tokens
    prompts = each / load.group * load.prompt_tokens
    return iterations * (max(read_s, computed_s) + shares.iteration_s) + (
        2 * model.num_read() * prompts / rate
    )


def _shares(gpu: Gpu, itemsize: int) -> Shares:
    return CPU_SHARES[itemsize] if gpu.is_cpu else GPU_SHARES


def _forward_flops(model: Model, job: Job, load: StepSize) -> float:
    """Returns the operations of a forward pass over a step's tokens. A shared prompt counts once
    for each minibatch that has a completion of it."""
    attention = 2 * model.num_layers * model.heads * model.head_size

    def flops(tokens: int) -> float:
        return tokens * (2 * model.num_read() + attention * tokens)

    prompt, whole = flops(load.prompt_tokens), flops(load.prompt_tokens + load.completion_tokens)
    minibatches = job.training.minibatches
    prompts_per_group = minibatches * (1 - (1 - 1 / minibatches) ** load.group)
    if not may_share(job.memory):
        prompts_per_group = load.group
    return load.completions * (whole - prompt + prompt * prompts_per_group / load.group)


def may_share(memory: MemorySpec) -> bool:
    """Returns whether the job's keys let the trainer share prefixes, if its model can."""
    if memory.shared_prefix == "off" or (memory.packing, memory.shared_prefix) == ("off", "auto"):
        return False
    return memory.attention in ("auto", "sdpa")


def _step(sample_s: float, train_s: float, sync_s: float, *, beside: bool) -> StepTime:
    """Returns the time of a step. `beside`: sampling runs while the trainer trains."""
    step_s = (max(sample_s, train_s) if beside else sample_s + train_s) + sync_s
    return StepTime(
        sample_s=round(sample_s, 3),
        train_s=round(train_s, 3),
        sync_s=round(sync_s, 3),
        step_s=round(step_s, 3),
        source="tabled",
    )
