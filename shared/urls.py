"""Addresses of services, as settings and bodies name them."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_VISIBLE = re.compile(r"[!-~]{1,1000}")


def check_service_url(url: str) -> str:
    """Returns the URL. Raises ValueError for what is not a service's: another scheme than http and
    https, a user or password in it, a path, or what is no URL at all."""
    example = "expected for example http://host:8001"
    no_url = f"{url!r} is no URL of a service; {example}"
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError as error:  # no number, or no address in its brackets
        raise ValueError(no_url) from error
    is_url = parts.scheme in ("http", "https") and parts.hostname and has_port
    if not is_url or not _VISIBLE.fullmatch(url):
        raise ValueError(no_url)
    if "@" in parts.netloc:
        raise ValueError(f"the URL of {parts.hostname!r} holds a user or a password; {example}")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{url!r} goes on after host and port; {example}")
    return url
