"""Making, listing and revoking API keys."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path, Request, Response

from services.orchestrator.api.access import TOKEN_ONLY, Keys
from shared.errors import BadRequest
from shared.http import codec, openapi
from shared.http.rendering import Made, media_type, render
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import CreatedKey, CreateKey, KeyList, KeyRevoked

PATH = "/v1/keys"

Name = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


def add_routes(service: Service, settings: Settings, keys: Keys) -> None:
    app = service.app

    @app.post(PATH, dependencies=[TOKEN_ONLY], responses=openapi.answers(Made[CreatedKey]))
    async def create_key(request: Request) -> Response:
        """Makes a key. Only this answer has its secret, and no operation keeps it: a caller that
        misses the answer revokes the key."""
        if settings.token is None:
            raise BadRequest(
                "this orchestrator has no HONE_TOKEN, so it answers whoever is on its machine and "
                "asks for no key; set HONE_TOKEN first"
            )
        data = await request.body()
        wanted = codec.decode(CreateKey, data, media_type(request, data))
        key = await asyncio.to_thread(keys.create, wanted.name, wanted.access)
        made = Made[CreatedKey](body=key, location=f"{PATH}/{key.name}", is_new=True)
        return await render(made, request)

    service.body(CreateKey, "POST", PATH)

    @app.get(PATH, dependencies=[TOKEN_ONLY])
    async def list_keys() -> KeyList:
        """The keys that are valid, without their secrets."""
        return KeyList(keys=tuple(await asyncio.to_thread(keys.list)))

    @app.delete("/v1/keys/{name}", dependencies=[TOKEN_ONLY])
    async def revoke_key(name: Name) -> KeyRevoked:
        """Revokes a key: requests with it are refused from now on."""
        await asyncio.to_thread(keys.revoke, name)
        return KeyRevoked(name=name)
