"""What a GPU of the trainer and one of the sampler hold, in bytes. Each formula is in the method of
its name.

In formulas a model has P parameters of b bytes (2 in bfloat16, 4 in float32), T of them trained, L
layers, hidden size H, intermediate size I, A heads and K heads of keys and values of size D, and
vocabulary V. A rank runs m tokens at a time and is one of N.

A trainer's rank holds weights, reference, gradients, optimizer and overhead all the time, and
besides them in turn what a pass takes, what the reduction of its gradients takes, and the update
(`working`). What is updated or kept in the host's memory is `host`; on a CPU that is the same
memory, and counts as the optimizer's.

Sources: ZeRO's stages are arXiv 1910.02054, section 3. Activations are counted as in arXiv
2205.05198, section 4, for the layers that transformers runs: a gated MLP, attention without its
matrix, and norms that keep their input in float32. What DeepSpeed, the output head and vLLM hold is
read off their code at the pinned versions; `bench/plan.py` compares the trainer's numbers with what
is measured.

Of a mixture of experts P has all of them. A token goes to k of size F: I is k F. All gates of a
layer are one tensor, which may be larger than V H. Nothing of this was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shared.job import Job
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

USABLE = 0.95
"""Share of a GPU's memory that tensors can fill: the rest is lost to fragmentation in torch's
allocator. Assumed."""

TRAINERS_SHARE = 0.5
"""Share of a host's memory that the trainer may take to save time. The rest is for the sampler and
other processes."""

HEAP_FACTOR, STATES_HEAP_FACTOR = 2.5, 1.5
"""Assumed memory of a process, as a multiple of the plan, if glibc keeps freed blocks: with
gradient checkpointing or LoRA, and without, when most is never freed. Measured: 2.3, 2.2, 1.3."""


@dataclass(frozen=True)
class Ranks:
    """The trainer's processes: how many, each with a device of its own, and the bytes of an element
    of weights."""

    num: int
    itemsize: int
    device: str  # "gpu" or "cpu"


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


@dataclass(frozen=True)
class RankMemory:
    """What a rank of the trainer holds for a job, in bytes, if its largest micro-batch has so many
    tokens (m)."""

    model: Model
    job: Job
    ranks: Ranks
    tokens: int = 0

    @cached_property
    def trained(self) -> int:
        return self.model.num_trainable(self.job.lora)

    @property
    def largest(self) -> int:
        """Elements of the largest trained tensor; 0 if only adapters are trained."""
        return 0 if self.job.lora else self.model.largest_tensor

    @property
    def is_low(self) -> bool:
        """Whether weights are of 16 bits."""
        return self.ranks.itemsize < 4

    @property
    def is_offloaded(self) -> bool:
        """Whether ZeRO's optimizer is in the host's memory for good."""
        return self.job.memory.offload_optimizer and self.job.memory.zero_stage > 0

    @cached_property
    def layer_per_token(self) -> int:
        """What one layer keeps of a token for its backward pass:
        b (4 I + 2 A D + 2 K D + 4 H) + 8 H. A row that shares prefixes may keep its keys and values
        a second time; more are computed again."""
        model, size, lora = self.model, self.ranks.itemsize, self.job.lora
        heads = (model.heads + model.kv_heads) * model.head_size
        # an MLP's two products, the gate's activation and what goes down; queries, keys, values and
        # what comes out; of experts copies of what goes in and comes out, 2 k H
        copies = 2 * model.experts.per_token * model.hidden if model.experts else 0
        kept = size * (4 * model.intermediate + copies + 2 * heads + 4 * model.hidden)
        kept += 8 * model.hidden  # norms
        if model.has_head_norms:  # of queries and keys, as in Qwen3
            kept += (size + 4) * heads
        if self.ranks.device == "cpu" and self.is_low:
            # attention is in float32
            kept += (6 * model.heads + 4 * model.kv_heads) * model.head_size
        if lora is not None and lora.dropout:
            # each adapter has an input of its own and a mask, in place of what several share
            inputs = sum(shape[1] for shape in model.adapted_shapes(lora)) // model.num_layers
            shared = 2 * model.hidden + model.heads * model.head_size + model.intermediate
            mask = size if self.ranks.device == "cpu" else 1
            kept += max(0, (size + mask) * inputs - size * shared)
        return kept

    @property
    def kept(self) -> int:
        """What all layers keep of a micro-batch until its backward pass: m L times b H, each
        layer's input, or without checkpointing all that a layer keeps."""
        is_input_only = self.job.memory.gradient_checkpointing
        of_layer = self.ranks.itemsize * self.model.hidden
        return (
            self.tokens
            * self.model.num_layers
            * (of_layer if is_input_only else self.layer_per_token)
        )

    @property
    def activations(self) -> int:
        """The peak in a layer's backward pass: what all layers keep, what this one computes again,
        and the gradients in its MLP, 3 b I, or in its attention."""
        model, size = self.model, self.ranks.itemsize
        again = self.layer_per_token if self.job.memory.gradient_checkpointing else 0
        gradients = 3 * size * model.intermediate
        if self.job.memory.shared_prefix != "off":
            # keys and values that are gathered, and their gradients, in float32 on a CPU; what the
            # MLP kept is freed by then
            itemsize = 4 if self.ranks.device == "cpu" else size
            gathered = 4 * KEYS_PER_TOKEN * itemsize * model.kv_heads * model.head_size
            gradients = max(gradients, gathered - 4 * size * model.intermediate)
        return self.kept + self.tokens * (again + gradients)

    @property
    def kernel(self) -> int:
        """The backward pass of attention's kernel on a GPU in 16 bits, which computes a part of a
        row at a time. Read off FlashAttention-2's code as it is in torch 2.13, and not measured."""
        if self.ranks.device != "gpu" or not self.is_low:
            return 0
        # queries whose gradient it has in float32, padded; as many again for each group of
        # multiprocessors, of the longest node, which are sums in order; and keys and values, whose
        # gradients it has for each head
        padded = min(self.tokens * (1 + KERNEL_PADDING), KERNEL_TOKENS)
        longest = min(self.tokens, self.job.sampling.max_tokens)
        split = MULTIPROCESSORS * longest // self.model.heads
        keys = min(KEYS_PER_TOKEN * self.tokens, KERNEL_KEYS)
        return 4 * self.model.heads * self.model.head_size * (padded + split + keys)

    @property
    def logits(self) -> int:
        """The output head, 8 t + (4 + b) V H + m H (2 b + 4): a tile of t logits in float32, twice,
        the float32 gradient of the head (not with LoRA), and of what goes into it."""
        of_chunk = min(self.job.memory.chunk_tokens, self.tokens) * self.model.vocabulary
        tile = min(of_chunk, TILE_LOGITS[self.ranks.device])
        weights = (4 + self.ranks.itemsize) * self.model.vocabulary * self.model.hidden
        inputs = self.tokens * self.model.hidden * (2 * self.ranks.itemsize + 4)
        return 8 * tile + (0 if self.job.lora else weights) + inputs

    @property
    def pass_peak(self) -> int:
        """The peak of the forward and backward pass over a micro-batch: in the last layer, or in
        the output head before it."""
        # the head's gradient waits for the embedding's, which is the same tensor's, or is more than
        # a buffer holds
        is_large = self.job.memory.zero_stage == 2 and self.is_low and self.largest > MAX_BUCKET
        waits = self.ranks.itemsize * self.largest if self.model.is_tied or is_large else 0
        return max(self.activations + self.kernel + waits, self.kept + self.logits)

    @cached_property
    def states(self) -> States:
        """Gradients in float32, added up over micro-batches, 4 T, and float32 masters with Adam's
        two moments, 12 T: over N what the ZeRO stage shares out."""
        job, stage, whole = self.job, self.job.memory.zero_stage, self.trained
        share = whole / self.ranks.num
        # DeepSpeed averages so many gradients at a time, unless it partitions them in the pass
        averaged = 4 * min(whole, MAX_REDUCED)
        # at stage 2 in bfloat16: the gradient of the one tensor that no buffer holds
        is_single = stage == 2 and self.is_low and self.largest > MAX_BUCKET
        single = (4 + self.ranks.itemsize) * self.largest if is_single else 0
        optimizer, host, resting = 12 * share, 0.0, 0.0
        if self.is_offloaded:
            # bfloat16 is added up on the GPU; at stage 1 all of the gradients are there too
            of_sum = 4 * share if self.is_low and stage < 3 else 0
            gradients, update = (4 * whole if stage == 1 else 0) + of_sum, single
            # masters and moments, gradients, weights on their way back
            usual = 16 + self.ranks.itemsize
            optimizer, host = 0, {1: usual, 2: usual if self.is_low else 24, 3: 20}[stage] * share
        elif stage == 0:  # weights in float32 are their own masters
            optimizer = resting = (12 if self.is_low else 8) * whole
            gradients, update = 4 * whole, averaged
        elif stage == 1 and self.is_low:  # with the micro-batch's own gradients in bfloat16
            gradients, update = 6 * whole, averaged
            resting = gradients + optimizer
        elif stage == 1:  # a flat copy for the step
            gradients, update = 4 * whole, 4 * share
        elif stage == 2:
            gradients, update = 4 * share, single if self.is_low else 4 * share
        else:  # a flat copy of as many as are updated at a time
            gradients, update = 4 * share, 4 * min(share, SUB_GROUP)
        if job.training.epochs * job.training.minibatches > 1:
            host += 12 * (share if stage else whole)  # a copy of masters and moments
        return States(gradients, optimizer, update, host, resting)

    @property
    def bucket(self) -> int:
        """Elements that are reduced at a time."""
        return min(self.trained, MAX_BUCKET)

    @property
    def passing(self) -> int:
        """The largest gradient on its way to the host's memory, at stages 1 and 2."""
        return self.ranks.itemsize * self.largest if self.is_offloaded else 0

    @property
    def buffers(self) -> int:
        """DeepSpeed's buffers for gradients, in bfloat16 twice and in float32, or in float32 twice;
        at stage 3 also for weights that are gathered."""
        size = self.ranks.itemsize
        match self.job.memory.zero_stage:
            case 0:
                return 0
            case 3:
                gathered = min(self.model.num_parameters, MAX_GATHERED)
                return (4 + size) * self.bucket + size * gathered
            case _:
                return 8 * self.bucket + self.passing

    @property
    def working(self) -> float:
        """The peak of a pass, the reduction of its gradients, and the update, with the buffers of
        each."""
        stage, reduced, update = self.job.memory.zero_stage, 0.0, self.states.update
        is_over = self.trained > MAX_BUCKET
        if stage in (1, 2) and not self.is_low and is_over and not self.is_offloaded:
            # the gradients of one micro-batch that were reduced
            reduced = 4 * self.trained / self.ranks.num
        if stage in (0, 3) or (stage == 2 and is_over):
            return max(self.pass_peak + reduced, update) + self.buffers
        # gradients are reduced after the pass
        waiting = self.ranks.itemsize * self.bucket
        return max(self.pass_peak + waiting, 8 * self.bucket + reduced, update) + self.passing


def heap_factor(job: Job) -> float:
    """Returns the factor of a job that says whether gradients are checkpointed."""
    return HEAP_FACTOR if job.memory.gradient_checkpointing or job.lora else STATES_HEAP_FACTOR


def room_on_cpu(host_bytes: float, job: Job) -> float:
    """Returns the largest plan of all ranks together with which "auto" leaves gradient
    checkpointing off for a job without: one for which freed blocks are kept too. Returning blocks
    to the system would take about as long as computing the layers again."""
    return TRAINERS_SHARE * host_bytes / heap_factor(job)


def trainer_memory(
    model: Model, job: Job, ranks: Ranks, longest: int = 0, step_tokens: int | None = None
) -> TrainerMemory:
    """Returns the memory of each rank of the trainer. `longest`: the tokens of the longest prompt
    with its completion, if known; a sequence longer than `memory.micro_batch_tokens` is a
    micro-batch of its own. `step_tokens`: the most tokens of a rank before an update, if known."""
    budget = job.memory.micro_batch_tokens
    full = budget if step_tokens is None else min(budget, step_tokens)
    rank = RankMemory(model, job, ranks, max(full, longest, job.sampling.max_tokens))
    states, in_host = rank.states, ranks.device == "cpu"
    weights, spread = model.num_parameters, ranks.num if job.memory.zero_stage == 3 else 1
    reference = weights if job.training.has_reference and job.lora is None else 0
    steady = {
        "weights": ranks.itemsize * (weights + (rank.trained if job.lora else 0)) / spread,
        "reference": ranks.itemsize * reference / spread,
        "gradients": states.gradients,
        "optimizer": states.optimizer + (states.host if in_host else 0),
        "overhead": TRAINER_OVERHEAD[ranks.device],
    }
    in_turn = {
        "activations": rank.activations + rank.kernel,
        "logits": rank.logits,
        "update": states.update,
        "buffers": rank.buffers,
    }
    return TrainerMemory(
        **{f"{name}_gib": gib(value) for name, value in (steady | in_turn).items()},
        peak_gib=gib(sum(steady.values()) + rank.working),
        host_gib=0 if in_host else gib(states.host),
    )


@dataclass(frozen=True)
class SamplerShape:
    """A sampler: the bytes of a weight, its device, the devices that its model is split over, the
    most sequences at once (`HONE_MAX_NUM_SEQS`), its sequences of a step, the tokens of each, and
    the adapters that it holds beside the model (`HONE_ROLLOUT_ADAPTERS` and one)."""

    itemsize: int
    device: str  # "gpu" or "cpu"
    tensor_parallel: int = 1
    max_sequences: int = 1
    sequences: int = 1
    sequence_tokens: int = 1
    max_adapters: int = 0


def sampler_memory(model: Model, job: Job, serving: SamplerShape) -> SamplerMemory:
    """Returns the memory of each GPU of a sampler: weights, b P over the GPUs; the cache of prompt
    and completion; activations of the prompt tokens computed at a time, logits of all sequences
    with their float32 log-probs, and what CUDA, its graphs and NCCL take."""
    size, split = serving.itemsize, serving.tensor_parallel
    # keys and values; if there are fewer heads than GPUs, heads are stored several times
    per_token = 2 * size * model.num_layers * max(1, model.kv_heads // split) * model.head_size
    sequences = min(serving.sequences, serving.max_sequences)
    adapters = 0
    if job.served_rank is not None and job.lora is not None:
        adapters = size * model.num_trainable(job.lora) * serving.max_adapters
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


def gib(size_bytes: float) -> float:
    """Returns bytes in GiB, to a thousandth."""
    return round(size_bytes / GIB, 3)
