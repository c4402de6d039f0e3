"""The jobs API on Modal: `modal deploy deploy/modal/orchestrator.py`.

The training loop is not here, because Modal ends a container that gets no requests, even if it
works. The loop is in the Function of `trainer.py`, which is spawned when a job waits. Both use
Redis, from the Secret `hone-redis`, and the Volume of the run folders.
"""

from __future__ import annotations

import asyncio
from typing import Any

import modal

from deploy.modal import calls
from deploy.modal.common import (
    DATA,
    DAY_S,
    IDLE_S,
    REDIS_SECRET,
    RUNS,
    SETTINGS,
    START_S,
    data,
    image,
    runs,
    secrets,
)

app = modal.App(f"{SETTINGS.modal_name}-orchestrator")

WATCH_MINUTES = 5
OPTIONS: dict[str, Any] = {
    "image": image("orchestrator", "modal"),
    "secrets": [*secrets("huggingface"), REDIS_SECRET],
    "volumes": {RUNS: runs, DATA: data.with_mount_options(read_only=True)},
}


@app.function(
    **OPTIONS, cpu=2.0, memory=4096, timeout=DAY_S, scaledown_window=IDLE_S, max_containers=1
)
@modal.concurrent(max_inputs=500)
@modal.asgi_app(requires_proxy_auth=True)
def api() -> Any:
    """The jobs API. `work` of the trainer's app runs the jobs that it accepts."""
    from deploy.modal.api import make_api
    from deploy.modal.calls import places

    return make_api(places(), runs, data, call_watch)


@app.function(
    **OPTIONS,
    schedule=modal.Period(minutes=WATCH_MINUTES),
    timeout=START_S + 300,
    max_containers=1,
)
async def watch() -> None:
    """Starts the trainer if a job waits, even without requests: the trainer's Function may have
    ended. If it failed, its jobs are paused."""
    from deploy.modal.api import bring_trainer, give_up, gone_s, open_store
    from deploy.modal.calls import places
    from shared.settings import load_settings

    settings = load_settings()
    store = open_store(settings)
    try:
        call = await calls.last()
        if call.failure:
            await asyncio.sleep(gone_s(settings))
            await give_up(store, call.failure, call.called_at, calls.forget)
        elif not call.is_running:
            urls = ",".join(places().values()).split(",")
            await bring_trainer(store, urls, calls.start)
    finally:
        await store.close()


async def call_watch() -> None:
    """Runs `watch` now, unless the trainer's Function was called and has not ended."""
    if not (await calls.last()).is_running:
        await modal.Function.from_name(app.name or "", "watch").spawn.aio()
