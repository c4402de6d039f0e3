"""Modal's front door, for those who call a service behind it: the proxy token that it asks for, and
the redirect by which it answers what takes longer than 150 s."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx2 as httpx

from shared.errors import Unavailable

HOSTS = (".modal.run", ".modal.direct")
"""What the names of its hosts end with. The proxy token is shown to nobody else."""


def proxy_headers(url: str) -> dict[str, str]:
    """Returns the headers with the proxy token, if the URL is of a host of Modal's."""
    if not (urlsplit(url).hostname or "").endswith(HOSTS):
        return {}
    from shared.environment import load_settings  # all settings, for those behind that door only

    settings = load_settings()
    if settings.modal_key is None or settings.modal_secret is None:
        return {}
    return {
        "modal-key": settings.modal_key.get_secret_value(),
        "modal-secret": settings.modal_secret.get_secret_value(),
    }


async def sent(http: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Returns the answer to the request, however often it is to be asked for elsewhere: 303 names
    where, and the request itself is not sent again. Raises Unavailable if that is another host,
    which is not to see what this one is sent."""
    response = await http.send(request)
    while response.status_code == 303:
        asked, location = response.request.url, response.headers.get("location", "")
        to = asked.join(location)
        if (to.scheme, to.host, to.port) != (asked.scheme, asked.host, asked.port):
            raise Unavailable(f"{asked} sends us on to another host: {to}", code="unreachable")
        response = await http.get(to)
    return response
