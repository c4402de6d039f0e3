"""One rank of the trainer, started by torchrun: `python -m services.trainer.ranks <run folder>`.

    main thread     every rank: the loop of commands.py. DeepSpeed runs here and nowhere else
    HTTP thread     rank 0: uvicorn, so /healthz and GET /state answer during a training step
    signal thread   rank 0: SIGTERM ends it even while the main thread waits inside a collective
    watch thread    rank 0: a rank that failed where others wait for it ends the service, with a sentence

Any rank that dies ends all of them (torchrun), and all die with torchrun. Left out: more than one host.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import uvicorn
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from services.trainer.app import make_service
from services.trainer.commands import COLLECTIVE_TIMEOUT, Channel, Inbox, Notes, follow, watch
from services.trainer.trainer import Trainer
from shared import logs
from shared.config import Settings, load_settings
from shared.errors import Failed
from shared.logs import get_logger

STOP_S = 8.0
FLUSH_S = 1.0
PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with_parent()
    if int(os.environ["RANK"]) == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # before any thread: all inherit it
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    settings = load_settings()
    logs.configure("trainer", settings if int(os.environ["RANK"]) == 0 else quieter(settings))
    run_dir = Path(sys.argv[1])
    device = start_distributed(run_dir)
    trainer = make_trainer(settings, device)
    channel, notes = Channel(), Notes(run_dir, dist.get_rank())
    if channel.rank == 0:
        lead(settings, trainer, channel, notes)
    else:
        follow(trainer, channel, notes, None)


def quieter(settings: Settings) -> Settings:
    """Returns settings under which a rank does not repeat what rank 0 logs."""
    return settings.model_copy(update={"log_level": "error" if settings.log_level == "error" else "warning"})


def die_with_parent() -> None:
    """Asks the kernel to send this process SIGTERM when torchrun dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        sys.exit("torchrun was gone before this rank began")


def start_distributed(run_dir: Path) -> torch.device:
    """Joins the other ranks and returns this rank's device.

    The process group is made here and not by DeepSpeed, which would bind it to a device (`device_id`) and so hang later
    weight syncs. Ranks meet through a file, because torch's TCP store would listen on every interface.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.use_deterministic_algorithms(True)
    store = FileStore(str(run_dir / "store"), num_ranks)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=COLLECTIVE_TIMEOUT)
    return device


def make_trainer(settings: Settings, device: torch.device) -> Trainer:
    from services.trainer.engine import DeepSpeedEngine, quiet_libraries  # imports deepspeed, which reads DS_ACCELERATOR
    from services.trainer.models import check_model

    quiet_libraries()
    return Trainer(
        settings,
        dist.get_rank(),
        dist.get_world_size(),
        check_job=check_model,
        start_engine=lambda job: DeepSpeedEngine(job, device),
    )


def lead(settings: Settings, trainer: Trainer, channel: Channel, notes: Notes) -> None:
    """Rank 0: serves HTTP beside its main loop, until SIGTERM or until another rank is gone."""
    inbox = Inbox()
    service = make_service(settings, trainer, inbox.run, versions(channel.num_ranks))
    server = service.server(settings.trainer_port)
    stopping = threading.Event()

    def end(sentence: str) -> NoReturn:
        get_logger().error("the trainer ends", reason=sentence)
        inbox.fail(Failed(f"{sentence}; the trainer service ends and has to be started again"))
        time.sleep(FLUSH_S)
        leave(1, trainer)

    context = contextvars.copy_context()  # what every log line carries
    http = threading.Thread(target=context.run, args=(serve, server, stopping, end), daemon=True)
    stopper = threading.Thread(target=stop_on_signal, args=(server, http, stopping, trainer), daemon=True)
    for thread in (http, stopper, threading.Thread(target=watch, args=(notes, end), daemon=True)):
        thread.start()
    try:
        follow(trainer, channel, notes, inbox)
    except RuntimeError as error:  # what a torch collective raises when its peer is gone
        if stopping.is_set():
            stopper.join()
        end(f"another rank is gone: {error}")


def serve(server: uvicorn.Server, stopping: threading.Event, end: Callable[[str], NoReturn]) -> None:
    """Runs HTTP; if it ends without being asked to, everything ends."""
    try:
        server.run()
    finally:
        if not stopping.is_set():
            end("the HTTP server ended")


def stop_on_signal(server: uvicorn.Server, http: threading.Thread, stopping: threading.Event, trainer: Trainer) -> None:
    """Waits for SIGTERM or SIGINT, then ends HTTP in order and the process at once."""
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    stopping.set()
    server.should_exit = True
    http.join(STOP_S)
    leave(0, trainer)


def leave(code: int, trainer: Trainer) -> NoReturn:
    """Ends the process from any thread, the main one possibly inside a collective."""
    trainer.free_shared_memory()
    sys.stderr.flush()
    os._exit(code)


def versions(num_ranks: int) -> dict[str, Any]:
    return {"ranks": num_ranks, **{name: version(name) for name in ("torch", "deepspeed", "transformers")}}


if __name__ == "__main__":
    main()
