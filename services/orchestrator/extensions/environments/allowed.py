"""Which hosts a job may have the orchestrator connect to."""

from __future__ import annotations

from urllib.parse import urlsplit

from shared.errors import BadRequest
from shared.http.gate import caller
from shared.http.urls import is_loopback
from shared.settings import Settings


def check_allowed(url: str, field: str, settings: Settings) -> None:
    """Raises BadRequest unless HONE_ALLOWED_ENVIRONMENTS has the URL's host."""
    parts = urlsplit(url)
    host, allowed = parts.hostname or "", settings.allowed_environments
    is_own = is_loopback(settings.host) and caller.get() is None
    if allowed is None and is_own and is_loopback(host):
        return
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    named = {name.lower() for name in allowed or ()}
    if {host, f"{host}:{port}"} & named:
        return
    unset = f"not set, so {'this machine' if is_own else 'none'}"
    hosts = unset if allowed is None else ", ".join(allowed) or "none"
    raise BadRequest(
        f"environment.{field} is {url!r:.200}, and jobs may not name its host; expected a host of "
        f"HONE_ALLOWED_ENVIRONMENTS ({hosts})"
    )
