"""The trained policy on this rank: model, adapters, reference and DeepSpeed, assembled for one job.
`update.py` trains it. READ FIRST."""

from __future__ import annotations

import gc
import logging
import math
import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime import bf16_optimizer
from torch import Tensor

from services.trainer.engine import Update
from services.trainer.learning import attention
from services.trainer.learning.batch import collate
from services.trainer.learning.correction import check_pairs
from services.trainer.learning.examples import allowed_versions, check
from services.trainer.learning.head import as_scoring_head
from services.trainer.learning.model_checks import (
    ChosenLayout,
    check_head,
    checkpoint_body,
    choose_layout,
    set_recomputing,
)
from services.trainer.learning.policy import (
    Policy,
    Reference,
    adapters_off,
    causal_lm,
    frozen_copy,
    rounding_noise,
)
from services.trainer.transfer import write_tensors
from services.trainer.zero import internals, lora, state
from services.trainer.zero import stages as zero
from services.trainer.zero.host_memory import HostCopies, give_back_large_blocks
from services.trainer.zero.internals import Snapshot, whole_weights
from services.trainer.zero.memory import MemoryPlan
from services.trainer.zero.models import (
    checkpoint_tensors,
    choose_dtype,
    copy_tokenizer,
    load_on_all_ranks,
    model_tensors,
)
from services.trainer.zero.update import Call, Updater
from shared.errors import BadRequest, Failed
from shared.host.logs import get_logger
from shared.job import Job
from shared.plan.memory import Ranks
from shared.plan.model import UnknownModelSize, of_config
from shared.weights.model_folder import window_of
from shared.wire import Canary, Example, Logprobs, Optimization, StepTotals, TokenIds, TokenLoss

CANARY_TOKENS = 32
"""Enough tokens that every matrix affects some log-prob, and few enough to cost little."""


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine. `model` is the policy's Hugging Face model, `wrapped` PEFT's wrapper
    around it (None without LoRA), `zero` DeepSpeed's engine around both.

    The counts are taken before DeepSpeed spreads the parameters over the ranks.
    """

    model: Any
    wrapped: Any
    zero: Any
    updater: Updater
    without: str
    dtype: torch.dtype
    num_parameters: int
    num_trainable: int
    weights_bytes: int


def start_engine(job: Job, device: torch.device) -> DeepSpeedEngine:
    """Returns the engine with the job's model loaded: a collective, torch.distributed being
    initialized. Raises BadRequest for a model or settings that cannot be trained."""
    try:
        return DeepSpeedEngine(job, device, assemble(job, device))
    except BaseException:  # undone and raised again, whatever it was
        zero.stop(None)
        raise


def assemble(job: Job, device: torch.device) -> EngineParts:
    """Returns the parts of an engine, checked on `device`: under ZeRO-3 the parameters are on the
    device only after DeepSpeed has partitioned them."""
    seed_everything(job.seed)
    dtype = choose_dtype(job.training.dtype)
    model = load_on_all_ranks(job, dtype, device, spread=job.memory.zero_stage == 3)
    num_parameters = sum(p.numel() for p in model.parameters())
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    planned = _planned(model, job, dtype, device)
    wrapped = lora.attach(model, job.lora).eval() if job.lora else None
    lora.begin(model, job.seed)
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    policy = Policy(model, job.temperature, job.memory.chunk_tokens)
    engine: Any = zero.start(policy, job, dtype)
    check_head(model, job.model)
    check_head_calls(job, model)
    layout, without = check_agreement(choose_layout(model, job.model, job.memory))
    can_recompute = start_recomputing(model, job)
    reference = start_reference(job, policy, wrapped, dtype, device)
    seed_everything(job.seed + dist.get_rank())  # each rank has another dropout
    copies = HostCopies(pinned=device.type == "cuda" and not job.memory.offload_optimizer)
    updater = Updater(
        job, engine, policy, reference, copies, layout, device, planned, can_recompute
    )
    return EngineParts(
        model=model,
        wrapped=wrapped,
        zero=engine,
        updater=updater,
        without=without,
        dtype=dtype,
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        weights_bytes=weights_bytes,
    )


def start_recomputing(model: Any, job: Job) -> bool:
    """Turns gradient checkpointing on unless the job's is off or, if that is "auto", a rank's model
    cannot; returns whether it is on: a collective. Raises BadRequest if the job asks for it and the
    model cannot."""
    setting, why_not = job.memory.gradient_checkpointing, ""
    if not setting:
        return False
    try:
        checkpoint_body(model, job.model)
    except BadRequest as error:
        if setting != "auto":
            raise
        why_not = error.detail.partition("; expected")[0]
    reasons = [why_not] * dist.get_world_size()
    if len(reasons) > 1:
        dist.all_gather_object(reasons, why_not)
    if not any(reasons):
        return True
    get_logger().warning("no gradient checkpointing", reason=next(filter(None, reasons)))
    set_recomputing(model, False)
    return False


def check_head_calls(job: Job, model: Any) -> None:
    """Raises BadRequest for a head that is called chunk by chunk where each call is a collective:
    ranks have different numbers of tokens, and so of chunks."""
    head = causal_lm(model).get_output_embeddings()
    collective = job.memory.zero_stage == 3 and dist.get_world_size() > 1
    if collective and as_scoring_head(head) is None:
        raise BadRequest(
            f"the output head of the model {job.model!r} is a {type(head).__module__}."
            f"{type(head).__name__}, expected a plain linear layer without an adapter: at "
            "memory.zero_stage 3 several ranks cannot call another one chunk by chunk; use "
            "memory.zero_stage 2, or lora.target_modules without the head"
        )


def check_agreement(chosen: ChosenLayout) -> ChosenLayout:
    """Returns the layout that all ranks chose: a collective. Raises Failed on every rank if one
    chose another layout, because each rank plans its part of a batch by its own layout."""
    each = [chosen] * dist.get_world_size()
    if len(each) > 1:
        dist.all_gather_object(each, chosen)
    for rank, other in enumerate(each):
        if other.layout != each[0].layout:
            raise Failed(
                f"rank {rank} would put sequences into {other.layout!r} rows and rank 0 into "
                f"{each[0].layout!r} ones, expected the same on all ranks "
                f"({other.without or each[0].without}); all ranks can compute them with "
                'memory.shared_prefix = "off" and memory.packing = "off"'
            )
    return chosen


def _planned(model: Any, job: Job, dtype: torch.dtype, device: torch.device) -> MemoryPlan | None:
    """Returns the memory plan of the loaded model, without adapters; None if its configuration
    lacks a size."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    try:
        sizes = of_config(model.config.to_dict(), job.model, shapes)
    except UnknownModelSize:
        return None
    kind = "gpu" if device.type == "cuda" else "cpu"
    return MemoryPlan(sizes, Ranks(dist.get_world_size(), dtype.itemsize, kind))


def start_reference(
    job: Job, policy: Policy, wrapped: Any, dtype: torch.dtype, device: torch.device
) -> Reference | None:
    """Returns the model that the KL term keeps the policy near to; None if nothing does."""
    if not job.training.has_reference:
        return None
    if wrapped is not None:
        return adapters_off(wrapped, policy)
    spread = job.memory.zero_stage == 3
    model = load_on_all_ranks(job, dtype, device, spread=spread)
    copy = Policy(model, job.temperature, job.memory.chunk_tokens)
    if spread:
        zero.start_frozen(copy, job, dtype)
    if attention.is_used_by(causal_lm(policy.model)):
        attention.use(model)
    return frozen_copy(copy)


@dataclass(frozen=True)
class SwappedJob:
    """The state of one job in an engine that several share, in host memory: the masters of its
    adapter and the optimizer's state, this rank's random numbers, and the calls whose gradient
    waits for an optimizer step. `job` has the micro-batch budget that fitted."""

    job: Job
    snapshot: Snapshot
    copies: HostCopies
    random: dict[str, Any]
    calls: list[Call]


class DeepSpeedEngine:
    """A job's model, optimizer and data-parallel slice on this rank: `start_engine` makes it. Jobs
    that train an adapter of the same model share one by turns: `swap_out` ends a job's turn, and
    `swap_in` begins one."""

    def __init__(self, job: Job, device: torch.device, parts: EngineParts) -> None:
        self._job = job
        self._device = device
        self._parts: Any = parts
        self.dtype = str(parts.dtype).removeprefix("torch.")
        self.device = str(device)
        self.num_parameters = parts.num_parameters
        self.num_trainable = parts.num_trainable
        self.without = parts.without
        self.weights_bytes = parts.weights_bytes
        self._own_copies: HostCopies | None = None  # the memory in which the job was stored before

    def swap_out(self) -> SwappedJob:
        """Ends the turn of the job, and returns its state."""
        parts = self._parts
        calls = parts.updater.swap_out()
        copies = self._own_copies or HostCopies(pinned=parts.updater.copies.pinned)
        snapshot = Snapshot.take(parts.zero, copies)
        return SwappedJob(parts.updater.job, snapshot, copies, internals.random_state(), calls)

    def swap_in(self, job: Job, aside: SwappedJob | None) -> None:
        """Begins the turn of a job: continues from a result of `swap_out`, or at its start (None):
        a collective."""
        parts, calls = self._parts, [] if aside is None else aside.calls
        internals.drop_gradients(parts.zero)  # calls of a job that was freed during its turn
        self._own_copies = aside and aside.copies
        if aside is None:
            lora.begin(parts.model, job.seed)
            internals.begin_anew(parts.zero)
            seed_everything(job.seed + dist.get_rank())
        else:
            job = aside.job
            aside.snapshot.restore(parts.zero)
        policy = parts.updater.policy
        reference = start_reference(job, policy, parts.wrapped, parts.dtype, self._device)
        updater = replace(parts.updater, job=job, reference=reference, calls=calls)
        self._job, self._parts = job, replace(parts, updater=updater)
        if aside is not None:
            internals.restore_random_state(aside.random)

    def update(
        self,
        examples: tuple[Example, ...],
        learning_rate: float,
        totals: StepTotals | None = None,
        version: int | None = None,
        *,
        supervised: bool = False,
    ) -> Update:
        """Trains the weights of `version` on `examples` of a batch of `totals`, and returns the
        result. Raises BadRequest for examples that do not fit the model or that staler weights
        sampled than the job allows, and as `Updater.train_step`, with weights and optimizer
        unchanged."""
        self._check(examples, allowed_versions(version, self._job.max_staleness))
        if supervised and self._job.training.objective == "dpo":
            check_pairs(examples)
        return self._parts.updater.train_step(
            examples, learning_rate, totals, version, supervised=supervised
        )

    def forward(self, examples: tuple[Example, ...]) -> tuple[Logprobs, Logprobs]:
        """Returns the log-probs of the examples' sampled tokens, and the reference's (empty without
        one). Raises BadRequest for examples that do not fit the model."""
        self._check(examples)
        return self._parts.updater.forward(examples)

    def _check(self, examples: tuple[Example, ...], sampled_by: range | None = None) -> None:
        config = self._parts.model.config.get_text_config()
        check(examples, config.vocab_size, sampled_by, window=_window(config))

    @property
    def num_calls(self) -> int:
        return len(self._parts.updater.calls)

    def forward_backward(
        self, examples: tuple[Example, ...], loss: TokenLoss
    ) -> tuple[float, Logprobs]:
        """Adds the gradient of the examples' loss. Raises BadRequest for examples that do not fit
        the model, and as `Updater.forward_backward`, with the gradient unchanged."""
        self._check(examples)
        return self._parts.updater.forward_backward(examples, loss)

    def optim_step(self, how: Optimization) -> float:
        """Changes the weights by the gradient so far. Raises as `Updater.optim_step`."""
        return self._parts.updater.optim_step(how)

    @torch.no_grad()
    def canary(self, noise: float | None = None) -> Canary | None:
        """Returns a fixed sequence with its log-probs by the weights, adapters included, and the
        `noise` of an earlier version; None: measured now, by a second pass. Returns None if they
        are not finite, because they could not match a sampler's."""
        model = self._parts.model
        ids = canary_ids(model.config.get_text_config(), self._job.max_model_len)
        whole = Example(
            prompt_token_ids=TokenIds(ids[:1]), token_ids=TokenIds(ids[1:]), advantage=0.0
        )
        chunk_tokens = self._job.memory.chunk_tokens
        batch = collate([whole], layout=self._parts.updater.layout).to(self._device)
        logprobs_N, _ = Policy(model, temperature=1.0, chunk_tokens=chunk_tokens)(batch)
        if noise is None:
            noise = rounding_noise(model, batch, logprobs_N, chunk_tokens)
        if not (logprobs_N.isfinite().all() and math.isfinite(noise)):
            return None
        logprobs = Logprobs(logprobs_N.float().tolist())
        return Canary(token_ids=ids, logprobs=logprobs, dtype=self.dtype, noise=noise)

    def save_weights(self, folder: Path) -> dict[str, str]:
        """Writes `model.safetensors` and `config.json` into `folder`; returns the tensors' digests
        on rank 0."""
        weights = whole_weights(self._parts.model)
        if dist.get_rank():
            return {}
        model: Any = self._parts.model
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        return write_tensors(
            checkpoint_tensors(model, self._merged(weights)), folder / "model.safetensors"
        )

    def save_adapter(self, folder: Path) -> None:
        """Writes the adapter alone, as PEFT does, into `folder`."""
        weights = whole_weights(self._parts.model, lora.is_adapters)
        if dist.get_rank() == 0:
            lora.save_adapter(self._parts.wrapped, weights, folder)

    def live_weights(self) -> dict[str, Tensor]:
        """Returns the tensors of the model on its device. Raises BadRequest with LoRA or ZeRO-3.
        Raises Conflict if the model's tensors differ from those of its checkpoint."""
        if not self._job.has_live_weights:
            raise BadRequest("under LoRA or ZeRO-3 no device has whole weights to serve")
        model = self._parts.model
        return model_tensors(model, whole_weights(model))

    def save_checkpoint(self, folder: Path) -> None:
        """Writes a whole Hugging Face model folder: weights, configurations, tokenizer; with LoRA,
        its adapter in `adapter/`."""
        weights = whole_weights(self._parts.model)
        if dist.get_rank() == 0:
            self._parts.model.save_pretrained(folder, state_dict=self._merged(weights))
            if self._parts.wrapped is not None:
                (folder / "adapter").mkdir()
                lora.save_adapter(self._parts.wrapped, weights, folder / "adapter")
            copy_tokenizer(self._job, folder)

    def save_state(self, folder: Path) -> None:
        """Writes this rank's share of the state from which training continues bit for bit."""
        state.save(self._parts.zero, folder)

    def load_state(self, folder: Path, *, optimizer: bool = True) -> None:
        """Continues from the files of `save_state`; without `optimizer` from their weights only."""
        own = internals.random_state()
        state.load(self._parts.zero, folder)
        if not optimizer:
            internals.forget_moments(self._parts.zero)
            internals.restore_random_state(own)

    def offload(self) -> None:
        """Moves master weights and optimizer into the host's memory. The weights stay on the
        device: samplers may be reading them, and checkpoints are made from them."""
        internals.offload(self._parts.zero)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        internals.reload(self._parts.zero)

    def close(self) -> None:
        """Frees the memory of model and optimizer."""
        parts, self._parts = self._parts, None
        zero.stop(parts.zero)
        del parts
        gc.collect()
        give_back_large_blocks()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            empty = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.11 lacks it
            (empty or torch._C._host_emptyCache)()  # pyright: ignore[reportPrivateUsage]

    def _merged(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        adapted = self._parts.wrapped is not None
        return lora.merged(self._parts.model, weights) if adapted else weights


def _window(config: Any) -> int | None:
    """Returns the context length in tokens; None if the model has none, or may be extended."""
    # Some configuration files have it under another name.
    return window_of({**config.to_dict(), "max_position_embeddings": _positions(config)})


def _positions(config: Any) -> int | None:
    """Returns the tokens for which a model has positions; None for a model without a limit, such as
    Mamba and BLOOM."""
    return getattr(config, "max_position_embeddings", None)


def canary_ids(config: Any, max_model_len: int | None) -> TokenIds:
    """Returns tokens spread over the vocabulary, at most one fewer than the sampler's limit."""
    limits = [limit for limit in (_positions(config), max_model_len) if limit is not None]
    length = min([CANARY_TOKENS, *(limit - 1 for limit in limits)])
    return TokenIds([(7919 * position + 11) % config.vocab_size for position in range(length)])


def quiet_libraries() -> None:
    """Silences the libraries, except for warnings and errors."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    bf16_optimizer.see_memory_usage = lambda *_, **__: None  # DeepSpeed prints there
    # these calls are in DeepSpeed's code
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
