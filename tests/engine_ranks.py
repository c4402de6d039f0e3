"""Real engines in processes of their own, joined by gloo: one function runs on every rank, and rank 0 gives its answer back."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_reference import TEMPERATURE

from shared.job import Job
from shared.job_file import parse_job


def a_job(model: Path | str, *, memory: dict | None = None, training: dict | None = None, **sections: Any) -> Job:
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


def start(num_ranks: int, folder: Path, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Starts `function(rank, *args)` on each of `num_ranks` ranks; the function returned waits for rank 0's answer."""
    import torch.multiprocessing as multiprocessing

    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=_main, args=(rank, num_ranks, folder, answers, function, args)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()

    def wait() -> Any:
        for process in processes:
            process.join(240)
        errors = [file.read_text() for file in sorted(folder.glob("error-*"))]
        assert not errors and all(process.exitcode == 0 for process in processes), "\n".join(errors)
        return answers.get()

    return wait


def run(num_ranks: int, folder: Path, function: Callable[..., Any], *args: Any) -> Any:
    return start(num_ranks, folder, function, *args)()


def join(rank: int, num_ranks: int, store: Path) -> None:
    """Makes this process a rank, as services/trainer/ranks.py does."""
    import torch
    import torch.distributed as dist

    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks)


def _main(rank: int, num_ranks: int, folder: Path, answers: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        join(rank, num_ranks, folder / "store")
        from services.trainer.engine import quiet_libraries

        quiet_libraries()
        answer = function(rank, *args)
        if rank == 0:
            answers.put(answer)
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the others may wait for this rank in a collective, and find out by its absence
