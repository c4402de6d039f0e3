"""`/v1/keys`: named API keys of the orchestrator."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.wire.base import Listing, Weight, Wire

Access = Literal["read", "full", "own"]
"""A key's rights: "read" may look at everything, "full" may also change it. "own" may submit jobs,
and may look at these alone, and change them."""

KeyName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


class CreateKey(Wire):
    """`POST /v1/keys`."""

    name: KeyName
    access: Access = "full"
    weight: Weight = 1.0


class ApiKey(Wire):
    """A key that is valid. `created_at` is Unix seconds. Jobs that share a trainer get tokens in
    proportion to the `weight` of the keys that submitted them."""

    name: KeyName
    access: Access
    created_at: int
    weight: Weight = 1.0


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
