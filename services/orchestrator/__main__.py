"""`python -m services.orchestrator`: the jobs API and its worker."""

from __future__ import annotations

import asyncio
import sys

from shared import logs
from shared.config import load_settings
from shared.errors import BadRequest, HoneError


async def serve() -> None:
    from services.orchestrator.app import create_service
    from services.orchestrator.queue.store import Store

    settings = load_settings()
    logs.configure("orchestrator", settings)
    if settings.redis_url is None:
        raise BadRequest(
            "HONE_REDIS_URL is not set: expected for example redis://127.0.0.1:6379/0 (`hone up` "
            "starts one itself)"
        )
    store = Store(settings.redis_url.get_secret_value())
    service = create_service(settings, store)
    server = service.server(settings.orchestrator_port)
    await store.open()
    await server.serve()


def main() -> None:
    try:
        asyncio.run(serve())
    except HoneError as error:
        sys.stderr.write(f"orchestrator: {error.detail}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
