"""An HTTP client of an application in the same process."""

from __future__ import annotations

from typing import Any

import httpx2


def in_process(app: Any) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=app)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost")
