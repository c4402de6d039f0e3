"""What a job's own code prints: the end of it, kept in memory. Standard library only."""

from __future__ import annotations

import io
import sys

KEEP_CHARS = 2000


class Printed(io.TextIOBase):
    """A text stream of which only the end is kept."""

    def __init__(self) -> None:
        self._text = ""

    @classmethod
    def install(cls) -> Printed:
        """Returns what stands for stdout and stderr from now on."""
        printed = cls()
        sys.stdout = sys.stderr = printed  # pyright: ignore[reportAttributeAccessIssue]
        return printed

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self._text = (self._text + text)[-KEEP_CHARS:]
        return len(text)

    def take(self) -> str:
        """Returns what was printed since the last time."""
        text, self._text = self._text, ""
        return text
