"""`python -m services.orchestrator`: the jobs API and its worker, at HONE_ORCHESTRATOR_PORT."""

from __future__ import annotations

import asyncio

from shared.errors import BadRequest
from shared.host.processes import run_main
from shared.settings import Settings


def main(settings: Settings) -> None:
    from services.orchestrator import watchdog
    from services.orchestrator.app import create_service
    from services.orchestrator.store.store import Store
    from services.orchestrator.writable import RunsDirCheck

    if settings.redis_url is None:
        raise BadRequest(
            "HONE_REDIS_URL is not set: expected for example redis://127.0.0.1:6379/0 (`hone up` "
            "starts one itself)"
        )
    try:
        store = Store(
            settings.redis_url.get_secret_value(),
            keep_jobs=settings.keep_jobs,
            keep_events=settings.keep_events,
            max_key_jobs=settings.max_key_jobs,
        )
    except ValueError as error:  # the URL is not shown: it may hold a password
        raise BadRequest(
            f"HONE_REDIS_URL is not the URL of a Redis: {error}; expected for example "
            "redis://127.0.0.1:6379/0"
        ) from error

    async def opening() -> None:
        await store.open()
        await RunsDirCheck(settings.runs_dir).open()
        watchdog.watch(asyncio.get_running_loop(), watchdog.limit_s(settings))

    create_service(settings, store).run(settings.orchestrator_port, opening=opening)


if __name__ == "__main__":
    run_main("orchestrator", main)
