"""Making, listing and revoking API keys. The gate lets only HONE_TOKEN through to these routes."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path

from services.orchestrator.api.access import Keys
from shared.config import Settings
from shared.errors import BadRequest
from shared.rendering import Made
from shared.service import Service
from shared.wire import CreatedKey, CreateKey, KeyList, KeyRevoked

Name = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


def add_routes(service: Service, settings: Settings, keys: Keys) -> None:
    app = service.app

    async def create_key(request: CreateKey) -> Made[CreatedKey]:
        """Makes a key. Its secret is in the answer and nowhere else."""
        if settings.token is None:
            raise BadRequest(
                "this orchestrator has no HONE_TOKEN, so it answers whoever is on its machine and "
                "asks for no key; set HONE_TOKEN first"
            )
        made = await asyncio.to_thread(keys.create, request.name, request.access)
        return Made[CreatedKey](body=made, location=f"/v1/keys/{made.name}", is_new=True)

    service.operation("POST", "/v1/keys", create_key)

    @app.get("/v1/keys")
    async def list_keys() -> KeyList:
        """The keys that are valid, without their secrets."""
        return KeyList(keys=tuple(await asyncio.to_thread(keys.list)))

    @app.delete("/v1/keys/{name}")
    async def revoke_key(name: Name) -> KeyRevoked:
        """Revokes a key: no request with it is answered any more."""
        await asyncio.to_thread(keys.revoke, name)
        return KeyRevoked(name=name)
