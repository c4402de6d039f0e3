"""`python -m services.rollout`: the sampler, at HONE_ROLLOUT_PORT. It listens within a second, on a
machine with GPUs once torch has checked them; vLLM is imported afterwards, in the background."""

from __future__ import annotations

import contextlib
import socket

from shared.errors import BadRequest
from shared.host import disk, nvidia
from shared.host.disk import run_for_volume
from shared.host.processes import run_main
from shared.settings import Settings
from shared.weights.model_folder import model_folder


def main(settings: Settings) -> None:
    from services.rollout.app import create_service
    from services.rollout.on_vllm.processes import VllmStarter
    from services.rollout.sampler import Sampler
    from services.rollout.weights.copies import Copies, Fetcher

    if len(settings.trainer_urls) > 1:
        raise BadRequest(
            f"HONE_TRAINER_URL is {settings.trainer_url!r}; expected one URL: a sampler has the "
            "weights of one trainer"
        )
    nvidia.check()
    if settings.rollout_model:
        model_folder(settings.rollout_model)
    replica = settings.rollout_replica or f"{socket.gethostname()}:{settings.rollout_port}"
    roots = (settings.shm_dir, settings.runs_dir)
    fetcher = Fetcher(settings.trainer_url, token=settings.bearer(), patience_s=settings.patience_s)
    copies_dir = settings.copies_dir or settings.shm_dir
    with contextlib.suppress(OSError):  # writers report the error; not all jobs write there
        disk.own_folder(copies_dir)
    own = f".sampler-{socket.gethostname()}-{settings.rollout_port}"
    copies = Copies(copies_dir / own, fetcher)
    sampler = Sampler(
        VllmStarter(settings),
        roots,
        copies,
        replica=replica,
        max_adapters=settings.rollout_adapters,
        refresh=lambda: run_for_volume(settings.runs_refresh, "published weights cannot be seen"),
    )
    create_service(settings, sampler).run(settings.rollout_port)


if __name__ == "__main__":
    run_main("rollout", main)
