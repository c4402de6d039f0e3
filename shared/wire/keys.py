"""`/v1/keys`: named API keys of the orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from shared.wire.base import Listing, Wire

Access = Literal["read", "full"]
"""What a key may do: look at everything, or change it too."""

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
    """A new key. `secret` is what a client sends as its token. It is shown this once: only its
    digest is kept."""

    secret: str


class KeyList(Listing[ApiKey]):
    """`GET /v1/keys`: the keys that are valid, by name."""

    keys: tuple[ApiKey, ...]

    def listed(self) -> Sequence[ApiKey]:
        return self.keys


class KeyRevoked(Wire):
    """`DELETE /v1/keys/{name}`: no request with the key is answered any more."""

    name: KeyName
