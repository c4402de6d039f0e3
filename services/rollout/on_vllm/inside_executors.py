"""How vLLM's engine process runs its model: in which processes, with which masks and ranks of the
sampled tokens. The engine process imports this module too.

**Processes.** With one device the model runs inside the engine process. On a GPU vLLM does the same
by default. On a CPU it would start another process to bind OpenMP threads, which are left unbound
here. In-process takes half the start time and 0.6 GB less, and no token goes from process to
process. With several devices there is one process for each, and vLLM ends them with the engine
process.

**Death.** A new process gets Hone's executor class, so it imports this module before it runs code
of vLLM. From then on it dies with the service. Otherwise vLLM's engine process would outlive a
killed service and keep all its memory.

**Masks** name the tokens that each token was drawn from. A token that was drawn from the whole
vocabulary has an empty mask: a full one of 152,000 tokens takes 600 kB.

**Ranks.** vLLM returns the rank of each sampled token with its log-prob, by a compiled comparison.
On a CPU it compiles C++ in each engine's first sample, which takes 13 s of the start on two cores.
Here nothing is compiled: 64 rows of 150,000 log-probs take 16 ms, and compiled they take 10.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.sample import sampler as vllm_sampler
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

from services.rollout.on_vllm.processes import SERVICE_PID
from shared.host.processes import die_with

FEW = 1 << 20
"""The most log-probs that are compared at once. The results of more do not stay in a core's cache
until they are counted, which takes 10 times as long."""


class MaskingScheduler(Scheduler):
    """Passes sampling masks on to the requests' outputs. vLLM has a setting for it, but refuses the
    setting with the model runner of a CPU, for which `InProcessExecutor` makes the masks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.return_sampling_mask = True


class ConstraintMaskingScheduler(MaskingScheduler):
    """Passes on the masks of steps in which the answer of some request is constrained. All others
    are drawn from the whole vocabulary, and their masks would be empty."""


class InProcessExecutor(UniProcExecutor):
    """Runs the model in the engine process. With a `MaskingScheduler` it adds the masks to the
    output."""

    _masks: Masks | None = None

    def _init_executor(self) -> None:
        if current_platform.is_cpu():
            sampler: Any = vllm_sampler
            sampler.batched_count_greater_than = count_at_least
        super()._init_executor()
        if self._masking in (MaskingScheduler, ConstraintMaskingScheduler):
            sampler = self.driver_worker.model_runner.sampler.topk_topp_sampler
            self._masks = sampler.forward = Masks(sampler)

    @property
    def _masking(self) -> Any:
        return self.vllm_config.scheduler_config.scheduler_cls

    def sample_tokens(self, grammar_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._masks is None:
            return super().sample_tokens(grammar_output, *args, **kwargs)
        self._masks.wanted = self._masking is MaskingScheduler or grammar_output is not None
        self._masks.kept_BV = None  # the masks are from another step, or from vLLM's warm-up
        output: Any = super().sample_tokens(grammar_output, *args, **kwargs)
        if output is not None:
            output.sampling_masks = self._masks.lists()
        return output


class ProcessPerDeviceExecutor(MultiprocExecutor):
    """Runs the model in one process per device."""


class Masks:
    """Replaces, on a CPU, the `forward` of vLLM's top-k and top-p sampler, and remembers which
    tokens it kept."""

    def __init__(self, sampler: Any) -> None:
        self._forward = sampler.forward
        self.wanted = True
        self.kept_BV: Tensor | None = None

    def __call__(
        self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the sampled tokens and the log-probs of all tokens. The log-prob is -inf for a
        token that could not be sampled, whether it was cut off here or before (min-p)."""
        tokens_B, logprobs_BV = self._forward(logits, generators, k, p)
        if self.wanted:
            self.kept_BV = logprobs_BV > -torch.inf
        return tokens_B, logprobs_BV

    def lists(self) -> SamplingMaskLists | None:
        """Returns for each row of the step the tokens that it was drawn from; no tokens for a row
        drawn from the whole vocabulary, and None for a step that drew nothing, or whose masks were
        not requested."""
        if self.kept_BV is None:
            return None
        kept_BV = self.kept_BV & ~self.kept_BV.all(1, keepdim=True)
        ids = kept_BV.nonzero()[:, 1].numpy().astype(np.int32)
        return SamplingMaskLists(ids, np.concatenate([[0], kept_BV.sum(1).cumsum(0).numpy()]))


def leave_out_whole_rows() -> None:
    """Makes vLLM's own mask, on a GPU, empty for a row drawn from the whole vocabulary."""
    lists = SamplingMaskTensors.tolists

    def of_cut_rows(masks: SamplingMaskTensors, *args: Any) -> SamplingMaskLists:
        counts_B = masks.counts.masked_fill(masks.counts == masks.vocab_size, 0)
        return lists(masks._replace(counts=counts_B), *args)

    vllm_masks: Any = SamplingMaskTensors
    vllm_masks.tolists = of_cut_rows


def count_at_least(logprobs_BV: Tensor, sampled_B1: Tensor) -> Tensor:
    """Returns `[B]` how many log-probs of each row are at least the sampled token's: its rank, 1
    for the most likely token."""
    if logprobs_BV.numel() <= FEW:
        return (logprobs_BV >= sampled_B1).sum(-1)
    rows = zip(logprobs_BV.numpy(), sampled_B1.numpy(), strict=True)
    return torch.tensor([np.count_nonzero(logprobs_V >= sampled) for logprobs_V, sampled in rows])


if torch.cpu._is_amx_tile_supported():  # pyright: ignore[reportPrivateUsage]
    # Linux lets a process use AMX only after a request. vLLM's attention in bfloat16 does not make
    # it, and would crash with an illegal instruction.
    torch.cpu._init_amx()  # pyright: ignore[reportPrivateUsage]

if os.environ.get(SERVICE_PID, str(os.getpid())) != str(os.getpid()):
    die_with(int(os.environ[SERVICE_PID]))
    # otherwise Ctrl-C, or SIGTERM to the service's process group, ends the engine first
    os.setpgid(0, 0)
