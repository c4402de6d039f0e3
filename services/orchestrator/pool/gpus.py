"""Which GPUs trainer and samplers compute on, as far as it says how weights can go."""

from __future__ import annotations

from dataclasses import dataclass

from shared.job import SyncMethod


@dataclass(frozen=True)
class Gpus:
    """The GPU that the trainer sends from and the GPUs of each sampler, by UUID; none on a CPU.
    `one_space`: all are in one `memory_space` (shared/weights/meeting.py)."""

    trainer: str | None
    samplers: tuple[tuple[str, ...], ...]
    one_space: bool = False

    def method(self) -> tuple[SyncMethod, str] | None:
        """Returns how weights get from one to the others without passing through files, and why;
        None if they cannot."""
        if self.trainer is None or not self.samplers or not all(self.samplers):
            return None
        if self.samplers == ((self.trainer,),) and self.one_space:
            return "ipc", f"trainer and sampler compute on the same GPU, {self.trainer}"
        if any(self.trainer in gpus for gpus in self.samplers):
            return None  # NCCL takes each GPU once, and containers read each other's no memory
        num_gpus = sum(map(len, self.samplers))
        return "nccl", f"the trainer's GPU and the samplers' {num_gpus} are different ones"
