"""How vLLM's engine process runs its model, and that it dies with the service. Imported by that
process too.

One device: the model runs inside the engine process. That is vLLM's own choice on a GPU; on a CPU
it starts another process to bind OpenMP threads, which we leave unbound. In-process is half the
start time, 0.6 GB less, and no hop between processes for each token. Several devices: one process
each, which vLLM ends when the engine process ends.

That the classes are ours makes a new process import this module before it runs anything of vLLM's,
when it is handed its executor class. From then on it dies with the service. By itself vLLM's engine
process outlives a killed service, with all its memory.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.sample import sampler as vllm_sampler

from services.rollout.on_vllm.inside import ranks
from services.rollout.on_vllm.inside.masks import Masks
from services.rollout.on_vllm.processes import SERVICE_PID
from shared.host.processes import die_with


class MaskingScheduler(Scheduler):
    """Hands sampling masks on to the requests' outputs. vLLM's own setting would do so, but it is
    refused with the model runner of the CPU, for which `InProcessExecutor` makes them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.return_sampling_mask = True


class InProcessExecutor(UniProcExecutor):
    """Runs the model in the engine process, and adds to its output which tokens each one was drawn
    from, if there is a `MaskingScheduler` to take it."""

    _masks: Masks | None = None

    def _init_executor(self) -> None:
        if current_platform.is_cpu():
            sampler: Any = vllm_sampler
            sampler.batched_count_greater_than = ranks.count_at_least
        super()._init_executor()
        if self.vllm_config.scheduler_config.scheduler_cls is MaskingScheduler:
            sampler = self.driver_worker.model_runner.sampler.topk_topp_sampler
            self._masks = sampler.forward = Masks(sampler)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if self._masks is None:
            return super().sample_tokens(*args, **kwargs)
        self._masks.kept_BV = None  # of another step, or of vLLM's warm-up
        output: Any = super().sample_tokens(*args, **kwargs)
        if output is not None:
            output.sampling_masks = self._masks.lists()
        return output


class ProcessPerDeviceExecutor(MultiprocExecutor):
    """Runs the model in one process per device."""


if os.environ.get(SERVICE_PID, str(os.getpid())) != str(os.getpid()):
    die_with(int(os.environ[SERVICE_PID]))
    os.setpgid(0, 0)  # else a Ctrl-C or SIGTERM to all of the service's group ends the engine first
