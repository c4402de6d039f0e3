"""The trained policy on this rank: model, adapters, reference and DeepSpeed put together for one
job. `update.py` trains it.

Left out: weights spread over ranks while they are read from disk (each rank reads all of them, into
CPU memory under ZeRO-3). Mixture-of-experts models whose ranks may meet different experts in one
micro-batch would put different gradients into one collective.
"""

from __future__ import annotations

import gc
import logging
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime import bf16_optimizer
from torch import Tensor

from services.trainer.engine import Update
from services.trainer.learning import reference
from services.trainer.learning.examples import check
from services.trainer.learning.policy import Policy, check_head, checkpoint_body, choose_packing
from services.trainer.zero import lora, state
from services.trainer.zero import stages as zero
from services.trainer.zero.internals import whole_weights
from services.trainer.zero.models import choose_dtype, copy_tokenizer, load_model
from services.trainer.zero.update import Updater
from shared.job import Job
from shared.wire import Example, StepTotals

ONE_FILE = "10000GB"


class DeepSpeedEngine:
    """One job's model, optimizer and data-parallel slice on this rank. torch.distributed is
    initialized before."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        seed_everything(job.seed)
        dtype = choose_dtype(job.training.dtype)
        model = load_model(job, dtype, _place(job, device))
        self.dtype = str(dtype).removeprefix("torch.")
        self.device = str(device)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.weights_bytes = sum(
            parameter.numel() * parameter.element_size() for parameter in model.parameters()
        )
        check_head(model, job.model)
        packed = choose_packing(model, job.model, job.memory.packing)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._wrapped = lora.attach(model, job.lora).eval() if job.lora else None
        self.num_trainable = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        if job.memory.gradient_checkpointing:
            checkpoint_body(model, job.model)
        self._model: Any = model
        policy = Policy(model, job.sampling.temperature, job.memory.chunk_tokens)
        self._zero: Any = zero.start(policy, job, dtype, device)
        self._updater: Any = Updater(
            job, self._zero, policy, self._reference(policy, dtype), packed=packed, device=device
        )
        seed_everything(job.seed + dist.get_rank())  # ranks drop out differently

    def update(
        self,
        examples: tuple[Example, ...],
        learning_rate: float,
        totals: StepTotals | None = None,
    ) -> Update:
        """Returns what training on `examples` of a batch of `totals` did. Raises BadRequest for
        examples that the model cannot take, and what `Updater.update` raises, with weights and
        optimizer as they were."""
        check(examples, self._vocab_size)
        return self._updater.update(examples, learning_rate, totals)

    def save_weights(self, folder: Path) -> None:
        """Writes `model.safetensors` and `config.json` into `folder`."""
        self._export(whole_weights(self._model), folder, max_shard_size=ONE_FILE)

    def save_checkpoint(self, folder: Path) -> None:
        """Writes a whole Hugging Face model folder: weights, configurations, tokenizer; with LoRA,
        its adapter in `adapter/`."""
        weights = whole_weights(self._model)
        self._export(weights, folder)
        if dist.get_rank() == 0:
            if self._wrapped is not None:
                lora.save_adapter(self._wrapped, weights, folder / "adapter")
            copy_tokenizer(self._job, folder)

    def save_state(self, folder: Path) -> None:
        """Writes this rank's share of what is needed to go on to the bit."""
        state.save(self._zero, folder)

    def load_state(self, folder: Path) -> None:
        """Goes on from what `save_state` wrote."""
        state.load(self._zero, folder)

    def close(self) -> None:
        """Frees the memory of model and optimizer."""
        zero.stop(self._zero)
        self._zero = self._updater = self._model = self._wrapped = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _reference(self, policy: Policy, dtype: torch.dtype) -> reference.Reference | None:
        if self._job.training.beta == 0:
            return None
        if self._wrapped is not None:
            return reference.adapters_off(self._wrapped, policy)
        model = load_model(self._job, dtype, _place(self._job, self._device))
        copy = Policy(model, self._job.sampling.temperature, self._job.memory.chunk_tokens)
        if self._job.memory.zero_stage == 3:
            zero.start_frozen(copy, self._job, dtype, self._device)
        return reference.frozen_copy(copy)

    def _export(self, weights: dict[str, Tensor], folder: Path, **settings: Any) -> None:
        """Writes weights and configuration from rank 0, adapters merged."""
        if dist.get_rank() == 0:
            plain = lora.merged(self._model, weights) if self._wrapped is not None else weights
            self._model.save_pretrained(folder, state_dict=plain, **settings)


def quiet_libraries() -> None:
    """Leaves the libraries' warnings and errors, and none of their progress bars and notes on how
    things go."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    bf16_optimizer.see_memory_usage = lambda *_, **__: None  # it prints
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # DeepSpeed's calls, not ours


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _place(job: Job, device: torch.device) -> torch.device:
    """Returns where a model is loaded to: under ZeRO-3 the device gets only its share of it."""
    return torch.device("cpu") if job.memory.zero_stage == 3 else device
