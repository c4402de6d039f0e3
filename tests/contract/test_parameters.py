"""What the query of a request may say."""

from __future__ import annotations

import pytest

from services.orchestrator.app import create_service
from services.orchestrator.store.store import Store
from shared.settings import Settings
from tests.support.in_process import in_process


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("status[]=failed", "unknown parameter 'status[]'"),
        ("limit[0]=3", "unknown parameter 'limit[0]'"),
        ("metadata[team=a", "unknown parameter 'metadata[team'"),
        ("limit=3&limit=4", "parameter 'limit' came 2 times, expected once"),
        ("metadata[a]=1&metadata[a]=2", "parameter 'metadata[a]' came 2 times, expected once"),
    ],
)
async def test_no_parameter_is_dropped_in_silence(
    settings: Settings, query: str, detail: str
) -> None:
    service = create_service(settings, Store("redis://127.0.0.1:1"))
    async with in_process(service.app) as http:
        refused = await http.get(f"/v1/jobs?{query}")
    assert refused.status_code == 422 and refused.json()["detail"].startswith(detail)
