"""The trained policy in DeepSpeed ZeRO-2: every rank holds all weights, and a slice of gradients, master weights and Adam.

One `update` is one optimizer step over any number of micro-batches. Each goes forward once and backward at once, where ZeRO-2
adds its gradient to this rank's slice (in float32), so only one micro-batch's activations and gradients exist at a time.

DeepSpeed averages gradients over ranks, so each loss is multiplied by their number; it divides by its own count of
accumulation steps, which is set to 1, and `set_gradient_accumulation_boundary` says which micro-batch is the last. The loss's
denominators are the whole step's. So any split into ranks and micro-batches gives the gradient of one big batch.

Left out: LoRA, optimizer offload, activation checkpointing of the body, a reference model, resuming. Mixture-of-experts models
whose ranks may meet different experts in one micro-batch would put different gradients into one collective.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from services.trainer import state
from services.trainer.batch import MicroBatch, check, micro_batches_of_rank
from services.trainer.correction import correction_weights, resolve
from services.trainer.loss import LossInputs, total_loss
from services.trainer.metrics import StepMetrics
from services.trainer.models import choose_dtype, copy_tokenizer, load_model
from services.trainer.policy import Policy, check_head
from services.trainer.trainer import Update
from shared.errors import Failed
from shared.job import Job, TrainingSpec
from shared.wire import Example

MAX_BUCKET = 200_000_000
"""Elements that are reduced or gathered at a time, and so the size of DeepSpeed's own buffers."""

ONE_FILE = "10000GB"


class DeepSpeedEngine:
    """One job's model, optimizer and data-parallel slice on this rank. torch.distributed is initialized before."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._correction = resolve(job.correction, job.max_staleness)
        seed_everything(job.seed)
        dtype = choose_dtype(job.training.dtype)
        self._model: Any = load_model(job, dtype, device)
        check_head(self._model, job.model)
        self.dtype = str(dtype).removeprefix("torch.")
        self.device = str(device)
        self.num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.num_trainable = sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)
        self.weights_bytes = sum(parameter.numel() * parameter.element_size() for parameter in self._model.parameters())
        policy = Policy(self._model, job.sampling.temperature)
        self._zero: Any = deepspeed.initialize(
            model=policy,
            optimizer=adamw(policy, job.training),
            config=zero_config(job.training, dtype, self.num_parameters),
            dist_init_required=False,
        )[0]

    def update(self, examples: tuple[Example, ...], learning_rate: float) -> Update:
        """Returns what one optimizer step over `examples` did. Raises BadRequest for examples that the model cannot take and
        Failed for a loss or gradient that is not finite, both with weights and optimizer as they were."""
        check(examples, self._model.config.vocab_size)
        training = self._job.training
        batches = micro_batches_of_rank(examples, dist.get_rank(), dist.get_world_size(), self._job.memory.micro_batch_tokens)
        metrics = StepMetrics(self._device, training, self._correction)
        for group in self._zero.optimizer.param_groups:
            group["lr"] = learning_rate
        for batch, is_last in _with_last(batches):
            self._zero.set_gradient_accumulation_boundary(is_last)
            self._accumulate(batch.to(self._device), examples, metrics)
        loss, values = metrics.reduce()
        self._zero.step()
        if not self._zero.was_step_applied():
            raise Failed(f"the step was refused: its gradient is not finite (loss {loss:g}); the weights are as they were")
        grad_norm = float(self._zero.get_global_grad_norm())
        return Update(loss, grad_norm, values)

    def save_weights(self, folder: Path) -> None:
        """Writes `model.safetensors` and `config.json` into `folder`."""
        if dist.get_rank() == 0:
            self._model.save_pretrained(folder, max_shard_size=ONE_FILE)

    def save_checkpoint(self, folder: Path) -> None:
        """Writes a whole Hugging Face model folder: weights, configurations, tokenizer."""
        if dist.get_rank() == 0:
            self._model.save_pretrained(folder)
            copy_tokenizer(self._job, folder)

    def save_state(self, folder: Path) -> None:
        """Writes this rank's share of what is needed to go on to the bit."""
        state.save(self._zero, folder)

    def load_state(self, folder: Path) -> None:
        """Goes on from what `save_state` wrote."""
        state.load(self._zero, folder)

    def close(self) -> None:
        """Frees the memory of model and optimizer."""
        self._zero.destroy()
        self._zero = self._model = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _accumulate(self, batch: MicroBatch, examples: tuple[Example, ...], metrics: StepMetrics) -> None:
        """Adds the batch's share of the step's gradient: one forward and one backward pass."""
        training, sampler_logprobs_N = self._job.training, batch.sampler_logprobs_N
        logprobs_N, entropy_N = self._zero(batch)
        num_tokens = sum(len(example.token_ids) for example in examples)
        before_N = logprobs_N.detach()
        x = LossInputs(
            logprobs_N=logprobs_N,
            old_logprobs_N=sampler_logprobs_N if self._correction.method == "none" else before_N,
            reference_logprobs_N=None,
            advantages_N=batch.advantages_N,
            weights_N=correction_weights(before_N, sampler_logprobs_N, batch.sequences_N, batch.num_sequences, self._correction),
            sequences_N=batch.sequences_N,
            lengths_N=batch.lengths_N,
            num_tokens=num_tokens,
            num_sequences=len(examples),
            mean_tokens=num_tokens,
            max_tokens=self._job.sampling.max_tokens,
            training=training,
        )
        loss = total_loss(x)
        metrics.add(batch, x, entropy_N, loss)
        metrics.add_mismatch(batch, before_N)
        self._zero.backward(_refusable(loss, logprobs_N) * (batch.weight * dist.get_world_size()))


def zero_config(training: TrainingSpec, dtype: torch.dtype, num_parameters: int) -> dict[str, Any]:
    """Returns DeepSpeed's configuration. Gradients are added up and reduced in float32 whatever the weights are in."""
    bucket = min(num_parameters, MAX_BUCKET)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.max_grad_norm,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": dtype is torch.bfloat16, "check_grad_overflow": True},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket + bucket % 2,
            "overlap_comm": False,
        },
    }


def adamw(policy: nn.Module, training: TrainingSpec) -> torch.optim.AdamW:
    """Returns AdamW; weight decay is on matrices only, as is usual, and not on norms and biases."""
    matrices = [parameter for parameter in policy.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in policy.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
    )


def quiet_libraries() -> None:
    """Leaves the libraries' warnings and errors, and none of their progress bars and notes on how things go."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls, not ours


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _refusable(loss: Tensor, logprobs_N: Tensor) -> Tensor:
    """Returns the loss, or one whose whole gradient is NaN where the loss is not finite: clamping can hide a NaN from the
    gradient, and DeepSpeed refuses a step by its gradient, on all ranks together."""
    return loss if math.isfinite(loss.item()) else logprobs_N.sum() * math.nan


def _with_last(batches: list[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    for position, batch in enumerate(batches, start=1):
        yield batch, position == len(batches)
