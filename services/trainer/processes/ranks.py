"""One rank of the trainer, started by torchrun: `python -m services.trainer.processes.ranks <this
life's folder in the run folder>`.

    main thread     every rank: the loop of commands.py. DeepSpeed runs here and nowhere else
    HTTP thread     rank 0: uvicorn, so /healthz and GET /state answer during a training step
    signal thread   rank 0: SIGTERM ends it even while the main thread waits inside a collective
    watch thread    rank 0: ends the service if a rank failed while others wait for it
    heartbeats      with several nodes: send them, and check that the other nodes send theirs

Any rank that dies ends all ranks of its node (torchrun), and so the ranks of the other nodes. The
launchers start them again, and rank 0 loads the previous job from its newest checkpoint.
"""

from __future__ import annotations

import contextvars
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

from services.trainer.app import create_service
from services.trainer.disk.checkpoints import fingerprint
from services.trainer.engine import Ranks
from services.trainer.processes.commands import FirstLoad, Inbox, RanksRestartNeeded, follow, watch
from services.trainer.processes.launcher import AGENT_PID, LaunchFolder
from services.trainer.processes.rendezvous import (
    COLLECTIVE_TIMEOUT,
    READ_TIMEOUT,
    Channel,
    Failures,
    Place,
    Stores,
    meet,
    send_heartbeats,
    tell_libraries,
    watch_heartbeats,
)
from services.trainer.trainer import Seams, Trainer
from services.trainer.transfer import gpu_of
from services.trainer.zero.memory import first_line
from shared.errors import BadRequest, HoneError, Unavailable
from shared.host import logs, nvidia, tracing
from shared.host.logs import get_logger
from shared.host.processes import end_with_parent
from shared.job import Job
from shared.settings import Settings, load_settings

STOP_S = 8.0
FLUSH_S = 1.0
COMES_BACK = "the trainer starts its ranks again, from the newest checkpoint"


def main() -> None:
    end_with_parent(int(os.environ[AGENT_PID]))
    settings = load_settings()
    place = Place.of(settings, int(os.environ["LOCAL_RANK"]))
    if place.rank == 0:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT}
        )  # before any thread, so that all inherit it
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    logs.configure("trainer", settings if place.local_rank == 0 else quiet_settings(settings))
    life = Path(sys.argv[1])
    folder = LaunchFolder(life.parent)
    try:
        stores = join(settings, place, life, folder)
        trainer_of = trainer_maker(settings, place, folder)
    except Exception as error:  # catches everything: remembered for the launcher, and raised again
        folder.remember_failure(
            f"rank {place.rank} could not start: {type(error).__name__}: {error}"
        )
        raise
    stores.failures.set_timeout(READ_TIMEOUT)
    failures = Failures(stores.failures, place.rank, place.num_ranks)
    channel = Channel.open(failures)
    if place.rank == 0:
        lead(settings, trainer_of(channel), channel, failures, folder, stores)
    else:
        if place.node_rank and place.local_rank == 0:
            start_thread(send_heartbeats, stores.heartbeats, place, abandon)
        try:
            follow(trainer_of(channel), channel, None)
        except RanksRestartNeeded as end:
            folder.remember_failure(end.error.detail)
            abandon(end.error.detail)  # a normal exit would wait for the failed device


def quiet_settings(settings: Settings) -> Settings:
    """Returns settings with which only the first rank of a node logs common messages."""
    return settings.model_copy(
        update={"log_level": "error" if settings.log_level == "error" else "warning"}
    )


def join(settings: Settings, place: Place, life: Path, folder: LaunchFolder) -> Stores:
    """Joins the other ranks in torch.distributed and returns where all meet.

    The process group is made here and not by DeepSpeed, which would bind it to a device
    (`device_id`) and so hang later weight syncs.
    """
    on_gpu = has_gpu()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device_of(place))
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.use_deterministic_algorithms(True)
    tell_libraries(place)
    stores = meet(settings, place, life, folder.past().last_failure)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=stores.group,
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return stores


def has_gpu() -> bool:
    """Returns whether the ranks compute on GPUs. Raises Failed where they should and torch cannot
    use any."""
    if torch.cuda.is_available():
        return True
    if failed := nvidia.failure("only another process can"):
        raise failed
    return False


def device_of(place: Place) -> torch.device:
    return (
        torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    )


def fault_of(device: torch.device) -> str | None:
    """Returns why this process cannot use a device any more; None if it works. After an error that
    destroys a GPU's context, every later call fails with it."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return first_line(error)
    return None


def shares_gpu(settings: Settings) -> bool:
    return settings.colocate or bool(set(settings.rollout_devices) & set(settings.trainer_devices))


def trainer_maker(
    settings: Settings, place: Place, folder: LaunchFolder
) -> Callable[[Ranks], Trainer]:
    """Imports the heavy libraries, and returns the function that makes this rank's trainer."""
    # These import deepspeed, which reads DS_ACCELERATOR.
    from services.trainer.zero.deepspeed_engine import quiet_libraries, start_engine
    from services.trainer.zero.memory import SharedGpu, check_fits, needs_of
    from services.trainer.zero.models import check_model, choose_dtype, model_files
    from shared.plan.memory import GIB, Ranks
    from shared.plan.model import UnknownModelSize, find_model

    def check_job(job: Job) -> None:
        check_model(job)
        device = device_of(place)
        if device.type == "cuda" and shares_gpu(settings):
            try:
                model = find_model(str(model_files(job)[0].parent))
            except (UnknownModelSize, BadRequest) as error:  # other names, or other files
                get_logger().warning("not checked whether it fits", reason=str(error))
                return
            size = choose_dtype(job.training.dtype).itemsize
            needs = needs_of(
                model, job, Ranks(place.num_ranks, size, "gpu"), settings.tensor_parallel_size
            )
            total_gib = torch.cuda.get_device_properties(device).total_memory / GIB
            check_fits(
                needs, SharedGpu(total_gib, settings.gpu_memory_utilization, settings.colocate)
            )

    quiet_libraries()
    seams = Seams(
        check_job=check_job,
        start_engine=lambda job: start_engine(job, device_of(place)),
        fingerprint=lambda job: fingerprint(model_files(job)),
        writing=folder.writing,
        remember_job=folder.remember_job,
        remember_budget=folder.remember_budget,
        budget=folder.budget,
        device_fault=lambda: fault_of(device_of(place)),
        gpu=gpu_of(device_of(place)),
    )
    return lambda ranks: Trainer(settings, ranks, seams, folder.past())


def lead(
    settings: Settings,
    trainer: Trainer,
    channel: Channel,
    failures: Failures,
    folder: LaunchFolder,
    stores: Stores,
) -> None:
    """Rank 0: serves HTTP beside its main loop, until SIGTERM or until another rank has ended. It
    first loads the previous ranks' job."""
    tracing.configure("trainer")
    inbox = Inbox()
    loaded_before = folder.job()
    readiness = FirstLoad.after_loading(inbox, loaded_before)
    service = create_service(
        settings, trainer, inbox.run, versions(channel.num_ranks), readiness.problem
    )
    if loaded_before:
        service.ownership.go_on(loaded_before)
    server = service.server(settings.trainer_port)
    stopping = threading.Event()

    def end_with(error: HoneError, reason: str) -> NoReturn:
        get_logger().error("the ranks end", reason=reason)
        readiness.ends = error.detail
        inbox.fail(error)
        time.sleep(FLUSH_S)
        leave(1, trainer)

    def end_because(error: HoneError) -> NoReturn:
        folder.remember_failure(error.detail)
        answer = type(error)(f"{error.detail}; {COMES_BACK}", code=error.code)
        end_with(answer, error.detail)

    def end(sentence: str) -> NoReturn:
        end_because(Unavailable(sentence))

    http = start_thread(serve, server, stopping, end)
    stopper = start_thread(stop_on_signal, server, http, stopping, trainer)
    start_thread(watch, failures, end_because)
    if settings.trainer_nodes > 1:
        start_thread(watch_heartbeats, stores.heartbeats, settings.trainer_nodes, end)
    try:
        follow(trainer, channel, inbox)
    except RanksRestartNeeded as must_end:
        end_because(must_end.error)
    except RuntimeError as error:  # raised by a torch collective whose peer has ended
        if stopping.is_set():
            stopper.join()
        reason = f"another rank has ended: {error}"
        end_with(Unavailable(f"{reason}; {COMES_BACK}"), reason)  # torchrun knows which one


def start_thread(act: Callable[..., None], *arguments: object) -> threading.Thread:
    """Returns the running thread; its log lines have the same fields as this thread's."""
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(act, *arguments), daemon=True
    )
    thread.start()
    return thread


def abandon(reason: str) -> NoReturn:
    """Ends a rank other than 0 from any thread."""
    get_logger().error("the ranks end", reason=reason)
    sys.stderr.flush()
    os._exit(1)


def serve(
    server: uvicorn.Server, stopping: threading.Event, end: Callable[[str], NoReturn]
) -> None:
    """Runs HTTP; if it ends without a request to stop, ends the process."""
    try:
        server.run()
    finally:
        if not stopping.is_set():
            end("the HTTP server ended")


def stop_on_signal(
    server: uvicorn.Server, http: threading.Thread, stopping: threading.Event, trainer: Trainer
) -> None:
    """Waits for SIGTERM or SIGINT, then ends HTTP gracefully and the process at once. Its exit code
    is not 0, so that torchrun ends the other ranks too: they may wait for this one inside a
    collective."""
    number = signal.sigwait({signal.SIGTERM, signal.SIGINT})
    stopping.set()
    server.should_exit = True
    http.join(STOP_S)
    leave(128 + number, trainer)


def leave(code: int, trainer: Trainer) -> NoReturn:
    """Ends the process from any thread, the main one possibly inside a collective."""
    trainer.free_shared_memory()
    sys.stderr.flush()
    os._exit(code)


def versions(num_ranks: int) -> dict[str, Any]:
    return {
        "ranks": num_ranks,
        **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
    }


if __name__ == "__main__":
    main()
