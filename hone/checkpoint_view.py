"""Shows checkpoints and the progress of a download in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from shared.wire import Checkpoint

MIB = 1 << 20


def checkpoint_table(checkpoints: Iterable[Checkpoint]) -> Table:
    table = Table("step", "MiB", "folder", box=None, pad_edge=False)
    for checkpoint in checkpoints:
        size = f"{checkpoint.size_bytes / MIB:,.1f}"
        table.add_row(str(checkpoint.step), size, checkpoint.path)
    return table


class Downloading:
    """A progress bar for each file, on a terminal only. Call it with a file's name, the bytes it
    has so far, and its size."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Downloading:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, name: str, have_bytes: int, size_bytes: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=size_bytes)
        self._bars.update(self._tasks[name], completed=have_bytes)
