"""Real engines in processes of their own, joined by gloo: functions are called on every rank, as
the trainer's commands are."""

from __future__ import annotations

import functools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

from shared.job import Job
from shared.job.file import parse_job
from tests.support.trainer_reference import TEMPERATURE

DEADLINE_S = 240

SPREAD_SMALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""ZeRO-3 leaves small parameters whole on every rank unless told otherwise, and all of a tiny
model's are small."""


def a_job(
    model: Path | str, *, memory: dict | None = None, training: dict | None = None, **sections: Any
) -> Job:
    return parse_job(
        {
            "name": "t",
            "model": str(model),
            "steps": 10,
            "data": {"train": "x"},
            "rewards": [{"grader": "x"}],
            "sampling": {"temperature": TEMPERATURE, "max_tokens": 32},
            "training": {"dtype": "float32", **(training or {})},
            "memory": memory or {},
            **sections,
        }
    )


def an_engine(job: Job) -> Any:
    """Returns the job's engine on a CPU, in a process that is a rank."""
    import torch

    from services.trainer.zero.deepspeed_engine import start_engine

    return start_engine(job, torch.device("cpu"))


def train(job: Job, batches: Sequence[Any], learning_rate: float, folder: Path) -> list[Any]:
    """Returns the updates over `batches`; the weights after them are in `folder`."""
    engine = an_engine(job)
    updates = [engine.update(batch, learning_rate) for batch in batches]
    engine.save_weights(folder)
    engine.close()
    return updates


@functools.cache
def warm() -> ForkServerContext:
    """Returns what starts processes that have imported the trainer's packages, which takes each 8 s
    of CPU time otherwise. They have the environment of the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["services.trainer.zero.deepspeed_engine"])
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        forkserver.ensure_running()
    return context


class Ranks:
    """`num_ranks` processes of one process group. `call(function, *args)` returns what
    `function(*args)` does on rank 0.

    A function that fails on any rank fails the call, with its traceback; of several ranks, that is
    the end of all.
    """

    def __init__(self, num_ranks: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        context = warm()
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self._ours = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(
                target=_serve, args=(rank, num_ranks, folder / "store", theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.submit(function, *args)
        return self.result()

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        for pipe in self._ours:
            pipe.send((function, args))

    def result(self) -> Any:
        answers = [self._answer(rank) for rank in range(len(self._ours))]
        errors = [error for _, error in answers if error]
        assert not errors, "\n".join(errors)
        return answers[0][0]

    def _answer(self, rank: int) -> tuple[Any, str]:
        try:
            is_there = self._ours[rank].poll(DEADLINE_S)
            assert is_there, f"rank {rank} did not answer within {DEADLINE_S} s"
            return self._ours[rank].recv()
        except EOFError:
            return None, f"rank {rank} is gone"


def join(rank: int, num_ranks: int, store: Path) -> None:
    """Makes this process a rank, as services/trainer/processes/ranks.py does."""
    import torch
    import torch.distributed as dist

    from services.trainer.zero.deepspeed_engine import quiet_libraries

    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
    }
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks
    )
    quiet_libraries()


def _serve(rank: int, num_ranks: int, store: Path, pipe: Any) -> None:
    join(rank, num_ranks, store)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer, error = function(*args), ""
        except BaseException:
            answer, error = None, f"rank {rank}: {traceback.format_exc()}"
        pipe.send((answer if rank == 0 else None, error))
        if error and num_ranks > 1:
            os._exit(
                1
            )  # the others may wait for this rank in a collective, and find out by its absence
