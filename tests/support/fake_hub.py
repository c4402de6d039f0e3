"""A Hugging Face Hub that hangs, or answers everything alike: HF_ENDPOINT of a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

NOT_FOUND = (
    b"HTTP/1.1 404 Not Found\r\nx-error-code: RepoNotFound\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


class FakeHub:
    """`answer` is what every request gets; None: nothing, ever. `num_open` counts the connections
    that are open now, `num_asked` those that ever were."""

    def __init__(self, answer: bytes | None = None) -> None:
        self.answer = answer
        self.num_open = 0
        self.num_asked = 0
        self.most_open = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        """Yields its URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def until_open(self, count: int) -> None:
        async with asyncio.timeout(180):
            while self.num_open != count:
                await asyncio.sleep(0.02)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.num_asked += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            while await reader.read(1 << 16):
                if self.answer:
                    writer.write(self.answer)
                    break
        except ConnectionError:
            pass
        finally:
            self.num_open -= 1
            writer.close()
