"""Uploads a file to an orchestrator."""

from __future__ import annotations

import httpx2 as httpx

ROWS = b'{"question": "w3 w4", "answer": 1}\n{"question": "w5", "answer": 2}\n'


async def upload(
    http: httpx.AsyncClient, content: bytes = ROWS, name: str = "rows.jsonl", **headers: str
) -> httpx.Response:
    return await http.post(
        "/v1/files",
        files={"file": (name, content)},
        data={"purpose": "fine-tune"},
        headers={key.replace("_", "-"): value for key, value in headers.items()},
    )
