"""How a caller connects to a service: the certificates that it trusts, and Modal's front door. That
door asks for a proxy token, and redirects requests that take longer than 150 s."""

from __future__ import annotations

import functools
import ssl
from urllib.parse import urlsplit

import httpx2 as httpx

from shared.errors import Unavailable

HOSTS = (".modal.run", ".modal.direct")
"""Endings of its host names. The proxy token is sent to no other host."""


def proxy_headers(url: str) -> dict[str, str]:
    """Returns the headers with the proxy token, if the URL is of a host of Modal's."""
    if not (urlsplit(url).hostname or "").endswith(HOSTS):
        return {}
    from shared.settings.environment import (
        load_settings,  # loads all settings, so only for Modal's hosts
    )

    settings = load_settings()
    if settings.modal_key is None or settings.modal_secret is None:
        return {}
    return {
        "modal-key": settings.modal_key.get_secret_value(),
        "modal-secret": settings.modal_secret.get_secret_value(),
    }


async def sent(http: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Returns the answer to the request. It follows any number of 303 redirects by GET, so the
    request itself is not sent again. Raises Unavailable for a redirect to another host, which must
    not see this host's token."""
    response = await http.send(request)
    while response.status_code == 303:
        asked, location = response.request.url, response.headers.get("location", "")
        to = asked.join(location)
        if (to.scheme, to.host, to.port) != (asked.scheme, asked.host, asked.port):
            raise Unavailable(f"{asked} sends us on to another host: {to}", code="unreachable")
        response = await http.get(to)
    return response


@functools.cache
def trusted() -> ssl.SSLContext:
    """Returns one context for all clients. A context for each client would read every certificate
    again, 25 ms of CPU time."""
    return httpx.create_ssl_context()


def trusted_by(url: str) -> ssl.SSLContext:
    """Returns the context for a client of one service. If the service needs no certificates, the
    context has none and trusts no one."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if url.startswith("http:") else trusted()
