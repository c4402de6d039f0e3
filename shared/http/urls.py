"""Addresses of services, as settings and bodies name them."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

_VISIBLE = re.compile(r"[!-~]{1,1000}")
_PORT = re.compile(r":(\d{5,})/?$")
_USER = re.compile(r"://[^/?#\s]*@")

PORTS = {"orchestrator": 8000, "rollout": 8001, "trainer": 8002, "reward": 8003, "redis": 6379}

REGISTERED = "registered"
"""Instead of a URL: every sampler that registered itself."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def url_at(host: str, port: int) -> str:
    """Returns the URL, for its own machine, of a service that listens on `host`."""
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{near}]:{port}" if ":" in near else f"http://{near}:{port}"


def is_direct(host: str) -> bool:
    """Whether a host is reached without a proxy: it is this machine, or a name without a dot, which
    only Compose's or a cluster's network knows."""
    return is_loopback(host) or not {".", ":"} & set(host)


def trainer_urls(text: str) -> tuple[str, ...]:
    """Returns the trainers that HONE_TRAINER_URL names."""
    return _split(text, ";")


def sampler_places(text: str) -> tuple[tuple[str, ...], ...]:
    """Returns the samplers of each trainer in HONE_ROLLOUT_URL."""
    return tuple(_split(group, ",") for group in text.split(";"))


def check_trainers(text: str) -> None:
    """Raises ValueError for an invalid HONE_TRAINER_URL."""
    urls = trainer_urls(text)
    for url in urls or (text,):
        check_url(url, "http://host:8002, with semicolons between several")
    _check_apart([{url} for url in urls])


def check_samplers(text: str, trainers: str) -> None:
    """Raises ValueError for a HONE_ROLLOUT_URL that is invalid, or does not fit these trainers."""
    groups = sampler_places(text)
    for place in (place for group in groups for place in group or (text,)):
        if place != REGISTERED:
            check_url(place, f'http://host:8001, or "{REGISTERED}"')
    if len(groups) != (num_trainers := len(trainer_urls(trainers))):
        raise ValueError(
            f"{text!r} has the samplers of {len(groups)} trainer(s), and HONE_TRAINER_URL names "
            f"{num_trainers}; expected the samplers of each trainer, with semicolons between them"
        )
    _check_apart([set(group) for group in groups])


def without_password(text: str) -> str:
    """Returns the text without users and passwords in URLs."""
    return _USER.sub("://***@", text)


def check_url(text: str, example: str) -> None:
    """Raises ValueError, with an `example` of what was expected, for an invalid URL."""
    try:
        url = urlsplit(text)
        is_url = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # no number, a number beyond 65535, or no address in its brackets
        is_url = False
    if not is_url or "," in text:
        port = _PORT.search(text)
        why = f": port {port[1]} is beyond 65535" if port and int(port[1]) > 65535 else ""
        named = without_password(text)
        raise ValueError(f"{named!r} is no URL{why}; expected for example {example}")


def _check_apart(groups: list[set[str]]) -> None:
    """Raises ValueError for a sampler that is listed for two trainers."""
    seen: set[str] = set()
    for group in groups:
        same = {url.rstrip("/").lower() for url in group}
        if twice := same & seen:
            raise ValueError(f"{min(twice)!r} is there twice; a service has one job at a time")
        seen |= same


def _split(text: str, separator: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(separator) if part.strip())


def check_service_url(url: str) -> str:
    """Returns the URL. Raises ValueError unless it can be a service's: for another scheme than http
    and https, a user or password, a path, or a text that is no URL."""
    example = "http://host:8001"
    check_url(url, example)
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ValueError(
            f"the URL of {parts.hostname!r} holds a user or a password; expected for example "
            f"{example}"
        )
    if not _VISIBLE.fullmatch(url):
        raise ValueError(
            f"{url!r:.200} has a blank, a character beyond ASCII, or more than 1000 characters; "
            f"expected for example {example}"
        )
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{url!r} continues after host and port; expected for example {example}")
    return url
