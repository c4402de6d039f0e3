"""What a GPU of the trainer and one of the sampler hold, in bytes.

Of a model with P parameters of b bytes (2 in bfloat16, 4 in float32), T of them trained, L layers,
hidden size H, intermediate size I, A heads and K heads of keys and values of size D, and vocabulary
V. A rank runs m tokens at a time (`memory.micro_batch_tokens`, or the longest sequence if that has
more) and is one of N, of which n share the gradients: n = N from ZeRO stage 2 on, else 1.

The trainer, on each rank:

    weights       b P                      over N in stage 3; adapters are part of them
    reference     b P                      with a reference model, no LoRA; over N in stage 3
    gradients     4 T / n                  float32, added up over micro-batches; 2 T more, of the
                                           micro-batch's own, in bfloat16 at stage 1
    optimizer     12 T                     float32 masters and Adam's two moments; over N from
                                           stage 1; 8 T where the weights are float32 at stage 0
    activations   k + m (a + i)            each layer's input, and one layer computed again
                  k + m i                  without gradient checkpointing
      with k      m b H L, or m L a        kept of all layers, with and without checkpointing
      with a      b (4 I + 2 A D + 2 K D + 4 H) + 8 H
                  + (A + K) D (4 + b)      where queries and keys have norms, as in Qwen3
                  + (6 A + 4 K) D          on a CPU in bfloat16: attention in float32, which
                                           processors without products of bfloat16 need
                  + (b + d) S              where adapters have dropout: each keeps its input, of S
                  - b (2 H + A D + I)      elements together, and a mask of d bytes, 1 on a GPU and
                                           b on a CPU, in place of what several share
      with i      max(3 b I, j)            gradients in the MLP, or in attention after it, where
                                           what the MLP kept is freed
      with j      4 g c K D - 4 b I        where prefixes are shared: keys and values that are
                                           gathered, at most g = 8 of a token, and their gradients,
                                           in c bytes: 4 on a CPU, b on a GPU
    kernel        4 A D (P + S + Q)        on a GPU in bfloat16: the backward pass of attention's
                                           kernel, which computes a part of a row at a time
      with P      min(129 m, 16384)        queries whose gradient it has in float32, padded
      with S      132 M / A                as many again for each group of multiprocessors, of the
                                           longest node, M = `sampling.max_tokens`: sums in order
      with Q      min(g m, 32768)          keys and values, whose gradients it has for each head
    logits        8 t + (4 + b) V H        a tile of t logits in float32, twice, and the float32
                  + m H (2 b + 4)          gradient of the output head (not with LoRA), and of what
                                           goes into it
    update        4 min(T, 5e8)            at stage 0, and 1 in bfloat16: gradients that are
                                           averaged at a time
                  4 T / N                  at stages 1 and 2 in float32: a flat copy for the step
                  (4 + b) V H              at stage 2 in bfloat16, where V H > B and it is trained:
                                           the gradient of the one tensor that no buffer holds
                  4 min(T / N, 1e9)        at stage 3: a flat copy of as many at a time
    buffers       8 B                      what is reduced at a time, B elements: in bfloat16 twice
                                           and in float32, or in float32 twice
                  (4 + b) B + b G          at stage 3, with G weights that are gathered
    passes        max(activations + kernel + e, k + logits)
      with e      b V H                    the head's gradient (not with LoRA), where it waits for
                                           the embedding's, which is the same tensor's, or at stage
                                           2 in bfloat16 is more than a buffer holds
    peak          weights + reference + gradients + optimizer + overhead
                  + max(passes + g, update) + buffers
                  + max(passes + b B, 8 B + g, update)
                                           at stage 1, and at stage 2 where T <= B: gradients are
                                           reduced after the pass
      with g      4 T / N                  in float32 at stages 1 and 2, where T > B: the gradients
                                           of one micro-batch that were reduced

With `memory.offload_optimizer` what is updated is in the host's memory:

    optimizer     0                        and update 0, but not at stage 2 in bfloat16
    gradients     4 T / N                  at stage 2 in bfloat16: they are added up on the GPU; at
                                           stage 1 all of them too, 4 T; else 0
    buffers       b V H                    more at stages 1 and 2: the largest trained tensor
    host          (16 + b) T / N           optimizer, gradients, weights on their way back; 24 T / N
                                           at stage 2 in float32; 20 T / N at stage 3

Masters and moments, 12 T / N, are copied to the host's memory before an update of several steps
(`training.epochs`, `minibatches`), and while the sampler has its turn (HONE_COLOCATE).

On a CPU that is the same memory, and counts as the optimizer's. Where a CPU's host has much memory,
freed blocks stay in the heap and are rarely used again (`is_worth_giving_back`):

    peak          weights + reference + gradients + optimizer + overhead
                  + max(activations + logits + g, update) + buffers

The sampler, on each of the t GPUs that a model is split over:

    weights       b P / t
    cache         2 b L K D / t            for each token of prompt and completion
    overhead      M b (2 I / t + 4 H)      activations of M prompt tokens at a time
                  + S V (b + 8)            logits of S sequences, and their float32 log-probs
                  + what CUDA, its graphs and NCCL take, which is assumed; on a CPU what vLLM's
                    process takes without a model

Sources: ZeRO's stages are arXiv 1910.02054, section 3. Activations are counted as in arXiv
2205.05198, section 4, for the layers that transformers runs: a gated MLP (4 I: two products, the
gate's activation, what goes down), attention without its matrix (queries, keys, values and what
comes out), and norms that keep their input in float32 (8 H). What DeepSpeed, the output head
and vLLM hold is read off their code at the pinned versions; `bench/plan.py` compares the trainer's
numbers with what is measured.

Of a mixture of experts P has all of them. A token goes to k of size F: I is k F, and a has 2 b k H
more, for copies of what goes in and comes out. All gates of a layer are one tensor, which may be
larger than V H. Nothing of this was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.job import Job, LoraSpec, MemorySpec
from shared.plan.model import Model
from shared.wire.records import SamplerMemory, TrainerMemory

GIB = 1 << 30

MAX_BUCKET = 200_000_000
"""Elements that are reduced or gathered at a time, and so the size of DeepSpeed's own buffers."""

MAX_REDUCED = 500_000_000
"""Gradients that DeepSpeed averages at a time where it does not partition them during the pass."""

SUB_GROUP = 1_000_000_000
"""Parameters that ZeRO-3 updates at a time: DeepSpeed's `sub_group_size`."""

MAX_GATHERED = 1_000_000_000
"""Parameters that ZeRO-3 keeps gathered at most: DeepSpeed's `stage3_max_live_parameters`."""

TILE_LOGITS = {"cpu": 1 << 22, "gpu": 1 << 26}
"""Logits of one tile: on a CPU they fit its caches (16 MiB in float32), on a GPU they keep its
matrix units busy (256 MiB)."""

KEYS_PER_TOKEN = 8
"""Most keys that attention gathers for a micro-batch, per token of its budget. A shared prefix is
computed once, but its keys are gathered for each sequence that continues it."""

KERNEL_TOKENS, KERNEL_PADDING, KERNEL_KEYS = 1 << 14, 128, 1 << 15
"""Most tokens and keys of one call of the kernel for sequences of unequal length. Its backward pass
has a float32 copy of the queries' gradient, with so many tokens of padding for each node, and the
gradients of keys and values for each head of queries."""

MULTIPROCESSORS = 132
"""Of an H100 or H200. Where a call has fewer nodes and heads, the kernel computes parts of a node's
gradient side by side, and adds them up in order."""

BATCHED_TOKENS = 2048
"""Prompt tokens that vLLM computes at a time by default."""

TRAINER_OVERHEAD = {"cpu": 100 << 20, "gpu": 1 << 30}
"""In bytes. On a GPU, assumed: CUDA's context, NCCL's buffers and cuBLAS's workspaces. On a CPU,
measured: what libraries keep after their first use. The interpreter with torch and DeepSpeed, 0.45
GiB, is loaded before the model and not counted."""

SAMPLER_OVERHEAD = {"cpu": 2 << 30, "gpu": 3 << 29}
"""In bytes. On a GPU, assumed: CUDA's context, CUDA graphs, NCCL's buffers. On a CPU, measured: the
engine's process with vLLM, torch and its compiled code, and a model of 0.3 million parameters."""


WORTH_BYTES = 128 << 20
"""Least bytes of a micro-batch for which giving memory back is worth its time."""

HEAP_FACTOR = 2.5
"""Most memory of a process, as a multiple of the plan, if glibc keeps freed blocks: 2.3 times were
measured."""


@dataclass(frozen=True)
class Ranks:
    """The trainer's processes: how many, each with a device of its own, the bytes of an element of
    weights, and whether they and a sampler take turns on these devices. `host_bytes`: on a CPU, the
    memory of the host or container; None: planned as where it is short."""

    num: int
    itemsize: int
    device: str  # "gpu" or "cpu"
    turns: bool = False
    host_bytes: float | None = None


@dataclass(frozen=True)
class SamplerShape:
    """A sampler: the devices that its model is split over, the most sequences at once
    (`HONE_MAX_NUM_SEQS`), its sequences of a step, the tokens of each, and the adapters that it
    holds beside the model (`HONE_ROLLOUT_ADAPTERS` and one)."""

    tensor_parallel: int
    max_sequences: int
    sequences: int
    sequence_tokens: int
    max_adapters: int
    itemsize: int
    device: str  # "gpu" or "cpu"


def layer_bytes_per_token(
    model: Model, itemsize: int, device: str, lora: LoraSpec | None = None
) -> int:
    """Returns the bytes per token that one layer keeps for its backward pass: `a` above. A row that
    shares prefixes may keep its keys and values a second time; more are computed again."""
    heads = 2 * (model.heads + model.kv_heads) * model.head_size
    normed = (model.heads + model.kv_heads) * model.head_size if model.has_head_norms else 0
    copies = 2 * model.experts.per_token * model.hidden if model.experts else 0
    mlp = 4 * model.intermediate + copies
    in_float32 = (6 * model.heads + 4 * model.kv_heads) * model.head_size
    in_model = itemsize * (mlp + heads + 4 * model.hidden + normed)
    upcast = in_float32 if device == "cpu" and itemsize < 4 else 0
    dropped = _dropout_bytes_per_token(model, itemsize, device, lora)
    return in_model + 8 * model.hidden + 4 * normed + upcast + dropped


def _dropout_bytes_per_token(
    model: Model, itemsize: int, device: str, lora: LoraSpec | None
) -> int:
    """Returns what a layer keeps more if its adapters have dropout: each of them then has an input
    of its own, and what drops out of it."""
    if lora is None or not lora.dropout:
        return 0
    inputs = sum(shape[1] for shape in model.adapted_shapes(lora)) // model.num_layers
    shared = 2 * model.hidden + model.heads * model.head_size + model.intermediate
    mask = itemsize if device == "cpu" else 1
    return max(0, (itemsize + mask) * inputs - itemsize * shared)


def tokens_at_once(job: Job, longest: int = 0, step_tokens: int | None = None) -> int:
    """Returns the tokens of the largest micro-batch if the longest sequence has `longest` and a
    rank has at most `step_tokens` before an update: a sequence longer than
    `memory.micro_batch_tokens` is a micro-batch of its own."""
    budget = job.memory.micro_batch_tokens
    full = budget if step_tokens is None else min(budget, step_tokens)
    return max(full, longest, job.sampling.max_tokens)


def kept_bytes(model: Model, job: Job, ranks: Ranks, tokens: int) -> int:
    """Returns the bytes that all layers together keep of a micro-batch with so many tokens until
    its backward pass: `k` above."""
    checkpointed = job.memory.gradient_checkpointing
    size = ranks.itemsize
    whole = layer_bytes_per_token(model, size, ranks.device, job.lora)
    return tokens * model.num_layers * (size * model.hidden if checkpointed else whole)


def activation_bytes(model: Model, job: Job, ranks: Ranks, tokens: int) -> int:
    """Returns the peak of a micro-batch's activations for so many tokens, in bytes."""
    checkpointed = job.memory.gradient_checkpointing
    size = ranks.itemsize
    again = layer_bytes_per_token(model, size, ranks.device, job.lora) if checkpointed else 0
    in_layer = tokens * (again + gradient_bytes_per_token(model, job, ranks))
    return kept_bytes(model, job, ranks, tokens) + in_layer


def gradient_bytes_per_token(model: Model, job: Job, ranks: Ranks) -> int:
    """Returns what a layer's backward pass takes of a token beside what the layer keeps: `i`
    above."""
    in_mlp = 3 * ranks.itemsize * model.intermediate
    if job.memory.shared_prefix == "off":
        return in_mlp
    itemsize = 4 if ranks.device == "cpu" else ranks.itemsize
    gathered = 4 * KEYS_PER_TOKEN * itemsize * model.kv_heads * model.head_size
    return max(in_mlp, gathered - 4 * ranks.itemsize * model.intermediate)


def kernel_bytes(model: Model, job: Job, ranks: Ranks, tokens: int) -> int:
    """Returns the bytes that the backward pass of attention's kernel takes on a GPU in 16 bits, for
    a micro-batch with so many tokens; 0 elsewhere. Read off FlashAttention-2's code as it is in
    torch 2.13, and not measured."""
    if ranks.device != "gpu" or ranks.itemsize > 2:
        return 0
    padded = min(tokens * (1 + KERNEL_PADDING), KERNEL_TOKENS)
    split = MULTIPROCESSORS * min(tokens, job.sampling.max_tokens) // model.heads
    keys = min(KEYS_PER_TOKEN * tokens, KERNEL_KEYS)
    return 4 * model.heads * model.head_size * (padded + split + keys)


def logits_bytes(model: Model, job: Job, ranks: Ranks, tokens: int) -> int:
    """Returns the bytes that the output head takes for log-probs and gradient of a micro-batch with
    so many tokens."""
    of_chunk = min(job.memory.chunk_tokens, tokens) * model.vocabulary
    tile = min(of_chunk, TILE_LOGITS[ranks.device])
    weights = (4 + ranks.itemsize) * model.vocabulary * model.hidden
    inputs = tokens * model.hidden * (2 * ranks.itemsize + 4)
    return 8 * tile + (0 if job.lora else weights) + inputs


def pass_bytes(model: Model, job: Job, ranks: Ranks, tokens: int) -> int:
    """Returns the peak of the forward and backward pass over a micro-batch with so many tokens, in
    bytes: in the last layer, or in the output head before it."""
    size, largest = ranks.itemsize, largest_trained(model, job)
    waits = model.is_tied or (job.memory.zero_stage == 2 and size < 4 and largest > MAX_BUCKET)
    in_layer = activation_bytes(model, job, ranks, tokens) + (size * largest if waits else 0)
    in_layer += kernel_bytes(model, job, ranks, tokens)
    in_head = kept_bytes(model, job, ranks, tokens) + logits_bytes(model, job, ranks, tokens)
    return max(in_layer, in_head)


@dataclass(frozen=True)
class States:
    """A rank's memory for updates, in bytes: on its device `gradients`, `optimizer` and, for a
    moment, `update`; in the host's memory `host`. `resting` stays on the device between two updates
    where sampler and trainer take turns."""

    gradients: float
    optimizer: float
    update: float
    host: float = 0
    resting: float = 0


def state_bytes(model: Model, job: Job, ranks: Ranks) -> States:
    """Returns a rank's memory for updates, with copies in the host's memory."""
    share = 12 * model.num_trainable(job.lora) / ranks.num if job.memory.zero_stage else 0
    copied = share or 12 * model.num_trainable(job.lora)
    states = _states(model, job, ranks)
    snapshot = copied if job.training.epochs * job.training.minibatches > 1 else 0
    moved = share if ranks.turns and is_moved(job.memory, ranks.itemsize) else 0
    return replace(states, host=states.host + snapshot + moved)


def _states(model: Model, job: Job, ranks: Ranks) -> States:
    stage, low = job.memory.zero_stage, ranks.itemsize < 4
    trained = model.num_trainable(job.lora)
    share = trained / ranks.num
    oversized = largest_trained(model, job)
    single = (4 + ranks.itemsize) * oversized if oversized > MAX_BUCKET else 0
    if is_offloaded(job.memory):
        on_gpu = {1: 4 * trained + (4 * share if low else 0), 2: 4 * share if low else 0}
        host = 20 if stage == 3 else 24 if stage == 2 and not low else 16 + ranks.itemsize
        return States(on_gpu.get(stage, 0), 0, single if stage == 2 and low else 0, host * share)
    averaged = 4 * min(trained, MAX_REDUCED)
    match stage:
        case 0:
            optimizer = (12 if low else 8) * trained
            return States(4 * trained, optimizer, averaged, resting=optimizer)
        case 1 if low:
            resting = 6 * trained + 12 * share
            return States(6 * trained, 12 * share, averaged, resting=resting)
        case 1:
            return States(4 * trained, 12 * share, 4 * share)
        case 2:
            return States(4 * share, 12 * share, single if low else 4 * share)
        case _:
            return States(4 * share, 12 * share, 4 * min(share, SUB_GROUP))


def is_offloaded(memory: MemorySpec) -> bool:
    """Whether ZeRO's optimizer is in the host's memory for good."""
    return memory.offload_optimizer and memory.zero_stage > 0


def is_moved(memory: MemorySpec, itemsize: int) -> bool:
    """Whether the trainer moves masters and Adam's moments to the host's memory while the sampler
    has its turn: DeepSpeed can at stage 2, and at stage 1 in float32."""
    stage = memory.zero_stage
    return not memory.offload_optimizer and (stage == 2 or (stage == 1 and itemsize == 4))


def largest_trained(model: Model, job: Job) -> int:
    """Returns the elements of the largest trained tensor; 0 if only adapters are trained."""
    return 0 if job.lora else model.largest_tensor


def buffer_bytes(model: Model, job: Job, itemsize: int) -> int:
    """Returns the bytes of DeepSpeed's buffers for gradients and, in stage 3, for weights."""
    bucket = min(model.num_trainable(job.lora), MAX_BUCKET)
    match job.memory.zero_stage:
        case 0:
            return 0
        case 3:
            return (4 + itemsize) * bucket + itemsize * min(model.num_parameters, MAX_GATHERED)
        case _:
            return 8 * bucket + itemsize * _passing(model, job)


def _passing(model: Model, job: Job) -> int:
    """Returns the elements of a gradient on its way to the host's memory, at stages 1 and 2."""
    return largest_trained(model, job) if is_offloaded(job.memory) else 0


def _working(
    model: Model, job: Job, ranks: Ranks, states: States, tokens: int, *, kept: bool = False
) -> float:
    """Returns the peak of a pass, the reduction of its gradients, and the update, with the buffers
    of each, in bytes. `kept`: what a pass frees is not used again."""
    stage, size = job.memory.zero_stage, ranks.itemsize
    trained = model.num_trainable(job.lora)
    passes, reduced = pass_bytes(model, job, ranks, tokens), 0.0
    if kept:
        in_layers = activation_bytes(model, job, ranks, tokens)
        passes = in_layers + logits_bytes(model, job, ranks, tokens)
    if stage in (1, 2) and size == 4 and trained > MAX_BUCKET and not is_offloaded(job.memory):
        reduced = 4 * trained / ranks.num
    if kept or stage in (0, 3) or (stage == 2 and trained > MAX_BUCKET):
        return max(passes + reduced, states.update) + buffer_bytes(model, job, size)
    bucket = min(trained, MAX_BUCKET)
    most = max(passes + size * bucket, 8 * bucket + reduced, states.update)
    return most + size * _passing(model, job)


def is_worth_giving_back(pass_bytes: int, planned_bytes: float, room_bytes: float) -> bool:
    """Returns whether freed large blocks should be returned to the system. A micro-batch takes
    `pass_bytes`, all ranks together are planned to take `planned_bytes`, and the host has
    `room_bytes`. Returning them costs time, because the system zeroes each block that it hands out
    again: a pass takes up to 1.5 times as long with a hidden size of 512, and twice as long with
    128. So blocks are kept while all ranks need at most half of the memory; the rest is for the
    sampler and other processes."""
    return pass_bytes >= WORTH_BYTES and planned_bytes * HEAP_FACTOR > room_bytes / 2


def trainer_memory(
    model: Model, job: Job, ranks: Ranks, longest: int = 0, step_tokens: int | None = None
) -> TrainerMemory:
    """Returns the memory of each rank of the trainer. `longest`: the tokens of the longest prompt
    with its completion, if known; `step_tokens`: the most tokens of a rank before an update, if
    known."""
    stage, size = job.memory.zero_stage, ranks.itemsize
    whole = model.num_parameters
    trained = model.num_trainable(job.lora)
    adapters = trained if job.lora else 0
    states = state_bytes(model, job, ranks)
    tokens = tokens_at_once(job, longest, step_tokens)
    weights = size * (whole + adapters) / (ranks.num if stage == 3 else 1)
    reference = size * whole if job.training.has_reference and job.lora is None else 0
    in_host = ranks.device == "cpu"
    parts = {
        "weights": weights,
        "reference": reference / (ranks.num if stage == 3 else 1),
        "gradients": states.gradients,
        "optimizer": states.optimizer + (states.host if in_host else 0),
        "activations": activation_bytes(model, job, ranks, tokens)
        + kernel_bytes(model, job, ranks, tokens),
        "logits": logits_bytes(model, job, ranks, tokens),
        "update": states.update,
        "buffers": buffer_bytes(model, job, size),
        "overhead": TRAINER_OVERHEAD[ranks.device],
    }
    steady = sum(
        parts[name] for name in ("weights", "reference", "gradients", "optimizer", "overhead")
    )
    working = _working(model, job, ranks, states, tokens)
    if ranks.host_bytes is not None and not is_worth_giving_back(
        pass_bytes(model, job, ranks, tokens), (steady + working) * ranks.num, ranks.host_bytes
    ):
        working = _working(model, job, ranks, states, tokens, kept=True)
    return TrainerMemory(
        **{f"{name}_gib": gib(value) for name, value in parts.items()},
        peak_gib=gib(steady + working),
        host_gib=0 if in_host else gib(states.host),
    )


def sampler_memory(model: Model, job: Job, serving: SamplerShape) -> SamplerMemory:
    """Returns the memory of each GPU of a sampler."""
    size, split = serving.itemsize, serving.tensor_parallel
    per_token = cache_bytes_per_token(model, size, split)
    sequences = min(serving.sequences, serving.max_sequences)
    adapters = 0
    if job.served_rank is not None and job.lora is not None:
        adapters = size * model.num_adapter_parameters(job.lora) * serving.max_adapters
    overhead = (
        SAMPLER_OVERHEAD[serving.device]
        + BATCHED_TOKENS * size * (2 * model.intermediate / split + 4 * model.hidden)
        + serving.max_sequences * model.vocabulary * (size + 8)
    )
    max_len = job.max_model_len or model.max_len
    return SamplerMemory(
        weights_gib=gib((size * model.num_parameters + adapters) / split),
        cache_gib=gib(per_token * serving.sequence_tokens * sequences),
        least_cache_gib=gib(per_token * max_len),
        overhead_gib=gib(overhead),
        cache_bytes_per_token=per_token,
        sequences=sequences,
    )


def cache_bytes_per_token(model: Model, itemsize: int, tensor_parallel: int = 1) -> int:
    """Returns the bytes of attention's cache for a token on each GPU. If there are fewer heads than
    GPUs, heads are stored several times."""
    heads = max(1, model.kv_heads // tensor_parallel)
    return 2 * itemsize * model.num_layers * heads * model.head_size


def gib(size_bytes: float) -> float:
    """Returns bytes in GiB, to a thousandth."""
    return round(size_bytes / GIB, 3)
