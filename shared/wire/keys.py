"""`/v1/keys`: named API keys of the orchestrator."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.wire.base import Listing, Wire

Access = Literal["read", "full"]
"""A key's rights: "read" may look at everything, "full" may also change it."""

KeyName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


class CreateKey(Wire):
    """`POST /v1/keys`."""

    name: KeyName
    access: Access = "full"


class ApiKey(Wire):
    """A key that is valid. `created_at` is Unix seconds."""

    name: KeyName
    access: Access
    created_at: int


class CreatedKey(ApiKey):
    """A new key. Clients send `secret` as their token. It is shown only once: Hone keeps its digest
    only."""

    secret: str


class KeyList(Listing[ApiKey]):
    """`GET /v1/keys`: the keys that are valid, by name."""

    keys: tuple[ApiKey, ...]


class KeyRevoked(Wire):
    """`DELETE /v1/keys/{name}`: requests with the key are refused from now on."""

    name: KeyName
