"""TRL's `GRPOTrainer`: its methods as they are, on a trainer that has a job's settings and neither
model nor data."""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from services.trainer.learning.loss import LossInputs

EOS = 2
UNUSED = ("vllm", "wandb")
"""What TRL imports where it is installed, and no test of TRL uses: nearly half of its import."""


def import_grpo_trainer() -> Any:
    """Returns TRL's `GRPOTrainer`, as where there are no `UNUSED` packages. It takes ten seconds,
    so all tests that need it are in one file."""
    absent = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # pyright: ignore  (None is how import is told so)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from trl.trainer.grpo_trainer import GRPOTrainer
    finally:
        for name in absent:
            del sys.modules[name]
    return GRPOTrainer


@dataclass(frozen=True)
class Result:
    loss: float
    gradient_N: Tensor
    weights_N: Tensor


def light_trainer() -> Callable[..., Result]:
    """Returns what runs TRL on `LossInputs` with settings of its own: what it makes of one
    micro-batch."""

    class LightTrainer(import_grpo_trainer()):
        def __init__(
            self,
            x: LossInputs,
            sampler_logprobs_N: Tensor | None,
            cut_off: tuple[int, ...],
            settings: dict[str, Any],
        ) -> None:
            vars(self).update(
                light_settings(x) | settings,
                _x=x,
                _sampler_logprobs_N=sampler_logprobs_N,
                _cut_off=cut_off,
            )
            self.use_vllm = self.vllm_importance_sampling_correction = (
                sampler_logprobs_N is not None
            )

        def _generate(self, prompts: list) -> tuple:
            completions = [
                [1] * (length - 1) + [1 if index in self._cut_off else EOS]
                for index, length in enumerate(lengths_S(self._x))
            ]
            sampler = (
                None
                if self._sampler_logprobs_N is None
                else ragged(self._sampler_logprobs_N, self._x)
            )
            logprobs = None if sampler is None else [row.tolist() for row in sampler]
            return [[1]] * len(prompts), completions, None, completions, logprobs, {}, None, None

        def _calculate_rewards(self, inputs: list, *args: Any) -> Tensor:
            return torch.zeros(len(inputs), 1)

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
            return padded(self._logprobs_N, self._x), torch.zeros(len(lengths_S(self._x)), 1), None

    def run(
        x: LossInputs,
        sampler_logprobs_N: Tensor | None = None,
        num_items: int | None = None,
        cut_off: tuple[int, ...] = (),
        **settings: Any,
    ) -> Result:
        trainer = LightTrainer(x, sampler_logprobs_N, cut_off, settings)
        trainer._logprobs_N = (
            x.old_logprobs_N
        )  # first the policy before any update, then that of the update
        num_sequences = len(lengths_S(x))
        inputs = trainer._generate_and_score_completions([{"prompt": "p"}] * num_sequences)
        inputs["advantages"] = padded(x.advantages_N, x)
        inputs["old_per_token_logps"] = padded(x.old_logprobs_N, x)
        if x.reference_logprobs_N is not None:
            inputs["ref_per_token_logps"] = padded(x.reference_logprobs_N, x)
        if num_items is not None:
            inputs["num_items_in_batch"] = torch.tensor(num_items)
        trainer._logprobs_N = x.logprobs_N.detach().clone().requires_grad_()
        loss = trainer._compute_loss(None, inputs)
        (gradient_N,) = torch.autograd.grad(loss, trainer._logprobs_N)
        real = padded(torch.ones_like(x.weights_N), x) == 1
        weights = inputs.get("importance_sampling_ratio", torch.ones(1)).expand_as(real)
        return Result(loss.item(), gradient_N, weights[real])

    return run


def light_settings(x: LossInputs) -> dict[str, Any]:
    """The attributes that the two methods read, with the job's settings in TRL's names."""
    training = x.training
    sequence = training.importance == "sequence" or training.loss == "gspo"
    return {
        "accelerator": SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            process_index=0,
            gather=lambda v: v,
            reduce=lambda v, reduction: v,
        ),
        "args": SimpleNamespace(
            delta=training.dual_clip,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=1,
            report_to=[],
            sapo_temperature_pos=training.tau_positive,
            sapo_temperature_neg=training.tau_negative,
            steps_per_generation=1,
            use_bias_correction_kl=False,
        ),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "loss_type": "grpo" if training.loss == "gspo" else training.loss,
        "importance_sampling_level": "sequence" if sequence else "token",
        "epsilon_low": training.clip_low,
        "epsilon_high": 1 + training.clip_high if training.loss == "cispo" else training.clip_high,
        "beta": training.beta,
        "ref_model": object(),
        "max_completion_length": x.denominators.max_tokens,
        "current_gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": None,
        "aux_loss_enabled": False,
        "environment_factories": None,
        "environments": [],
        "mask_truncated_completions": False,
        "eos_token_ids": [EOS],
        "multi_objective_aggregation": "sum_then_normalize",
        "num_generations": 1,
        "off_policy_mask_threshold": None,
        "pad_to_multiple_of": None,
        "reward_func_names": ["r"],
        "reward_weights": torch.ones(1),
        "scale_rewards": "none",
        "tools": [],
        "top_entropy_quantile": 1.0,
        "_entropy_bonus_enabled": False,
        "_is_vlm": False,
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_metrics": {"train": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_tokenizer": SimpleNamespace(pad_token_id=0),
    }


def lengths_S(x: LossInputs) -> list[int]:
    return torch.bincount(x.sequences_N).tolist()


def ragged(values_N: Tensor, x: LossInputs) -> list[Tensor]:
    return list(values_N.split(lengths_S(x)))


def padded(values_N: Tensor, x: LossInputs) -> Tensor:
    """`[S, T]`, with -7 at the padding, where no value may matter."""
    return pad_sequence(ragged(values_N, x), batch_first=True, padding_value=-7.0)
