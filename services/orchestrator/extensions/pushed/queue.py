"""The queue of a job whose groups are pushed: files in its run folder, so that every orchestrator
that shares the folder accepts groups.

    pushed/journal.jsonl     a line for each group that was accepted, for each round of a step that
                             took groups, wants some, or dropped stale ones
    pushed/000017.msgpack    group 17, until the batch of its step is stored
    pushed/lock              held by the process that reads or writes

A group is accepted once its line is on disk. Groups are numbered from 1 and taken in this order. A
step that is done again takes the groups in its line, so no group is lost and none is trained twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from services.orchestrator.samplers.status import AttemptStatus
from services.orchestrator.seams import Round
from services.orchestrator.store.finished import CHECKSUM_BYTES, checksum
from services.orchestrator.store.folder import PUSHED_FOLDER
from services.orchestrator.tasks import write_despite_cancel
from services.orchestrator.writable import writing
from shared.errors import Conflict, Failed
from shared.host import disk
from shared.http import codec
from shared.wire import ScoredGroup

T = TypeVar("T")

Versions = tuple[int, int] | None
"""The oldest and the newest version that sampled a group; None: unknown."""


@dataclass
class Ledger:
    """The contents of the journal. `versions` has the groups that no step has taken, by number;
    `took` and `wants` are by step and round. `programs` have registered to push groups."""

    num_accepted: int = 0
    num_dropped: int = 0
    keys: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    versions: dict[int, Versions] = field(default_factory=dict[int, Versions])
    took: dict[tuple[int, int], list[int]] = field(default_factory=dict[tuple[int, int], list[int]])
    wants: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    programs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def add(self, line: dict[str, Any]) -> None:
        """Applies a line of the journal."""
        if number := line.get("accepted"):
            self.num_accepted = number
            self.keys[line["key"]] = number, line["digest"]
            self.versions[number] = tuple(line["versions"]) if line["versions"] else None
            return
        if program := line.get("registered"):
            self.programs.append(program)
            return
        place = line["step"], line["round"]
        self.num_dropped += len(line.get("dropped", ()))
        for number in (*line.get("took", ()), *line.get("dropped", ())):
            self.versions.pop(number, None)
        if "took" in line:
            self.took[place] = line["took"]
        if "wants" in line:
            self.wants[place] = line["wants"]

    def num_trained(self, last_step: int) -> int:
        """Returns how many groups the steps up to `last_step` took."""
        return sum(len(took) for (step, _), took in self.took.items() if step <= last_step)

    def newest_trained(self, last_step: int) -> int:
        """Returns the last group that a step up to `last_step` took."""
        steps = (took for (step, _), took in self.took.items() if step <= last_step)
        return max((max(took, default=0) for took in steps), default=0)

    def num_ahead(self, last_step: int) -> int:
        """Returns how many groups are trained before the next accepted group, after `last_step`. A
        group that replaces another one does not delay later groups."""
        counts = {place: len(took) for place, took in self.took.items()} | self.wants
        done = sum(
            count
            for (step, round), count in counts.items()
            if round or (step <= last_step and (step, round) in self.took)
        )
        return max(self.num_accepted - self.num_dropped - done, 0)


class PushedQueue:
    """The queue in the run folder `run`. All methods wait for the disk: call them in a thread."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._folder = run / PUSHED_FOLDER
        self._ledger = Ledger()
        self._read_bytes = 0

    def accept(
        self,
        group: ScoredGroup,
        admit: Callable[[Ledger], None],
        *,
        digest: str,
        key: str | None,
        last_step: int,
    ) -> int:
        """Returns the group's number once it is on disk. `digest` and `key` are of the group as it
        was sent: the same group again has the same number. Without a key it counts as a repetition
        until it is trained, by a step up to `last_step`. Raises Conflict, "body_differs", for a key
        that came with another digest. `admit` raises if there is no room for a new group."""
        with self._locked() as ledger:
            name = key or digest
            known = ledger.keys.get(name)
            if known and (key or known[0] > ledger.newest_trained(last_step)):
                return _same(known, name, digest)
            admit(ledger)
            number = ledger.num_accepted + 1
            self._write(self._file(number), group)
            found = [each for rollout in group.group.rollouts for each in rollout.versions]
            versions = (min(found), max(found)) if found else None
            self._append(accepted=number, key=name, digest=digest, versions=versions)
            return number

    def register(self, program: dict[str, Any]) -> tuple[int, str]:
        """Registers a program. Returns its number, from 0, and a name that no other program has."""
        with self._locked() as ledger:
            chosen = program["desired_name"]
            same = sum(each["desired_name"] == chosen for each in ledger.programs)
            self._append(registered=program)
            return len(ledger.programs) - 1, f"{chosen}_{same}"

    def take(self, asked: Round) -> tuple[list[int], bool]:
        """Returns the numbers of the groups of this round, and whether it has as many as it takes.
        Groups that are too stale for it are dropped."""
        place = {"step": asked.step, "round": asked.round}
        with self._locked() as ledger:
            if (took := ledger.took.get((asked.step, asked.round))) is not None:
                return took, True
            stale = [n for n, versions in ledger.versions.items() if not _fits(asked, versions)]
            if stale:
                self._append(**place, dropped=stale)
                for number in stale:
                    self._file(number).unlink(missing_ok=True)
            found = [*ledger.versions][: asked.count]
            if len(found) == asked.count:
                self._append(**place, took=found)
                return found, True
            if ledger.wants.get((asked.step, asked.round)) != asked.count:
                self._append(**place, wants=asked.count)
            return found, False

    def group(self, number: int) -> ScoredGroup:
        """Returns an accepted group. Raises Failed if its file is damaged."""
        found = self._stored(self._file(number))
        prompt = found.prompt.model_copy(update={"index": number})
        return found.model_copy(update={"prompt": prompt})

    def _write(self, path: Path, group: ScoredGroup) -> None:
        data = codec.encode(group, codec.MSGPACK)
        disk.write_file(path, checksum(data) + data)

    def _stored(self, path: Path) -> ScoredGroup:
        data = path.read_bytes()
        found, data = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
        if found != checksum(data):
            raise Failed(
                f"the pushed group {str(path)!r} is damaged: its checksum is {found.hex()}, "
                f"expected {checksum(data).hex()}"
            )
        return codec.decode_tolerantly(ScoredGroup, data, codec.MSGPACK)

    def look(self, of: Callable[[Ledger], T]) -> T:
        """Returns `of` the ledger as of now."""
        with self._locked() as ledger:
            return of(ledger)

    @contextlib.contextmanager
    def _locked(self) -> Generator[Ledger]:
        with writing("run folder", self._run):
            if not self._folder.is_dir():
                # not its parents: the run folder may have been removed
                self._folder.mkdir(exist_ok=True)
                disk.flush(self._run)
            with disk.locked(self._folder / "lock"):
                self._read()
                yield self._ledger

    def _read(self) -> None:
        """Reads the lines since the last time. Cuts off a line that a crash left incomplete."""
        if not self._journal.exists():
            return
        with self._journal.open("rb+") as file:
            file.seek(self._read_bytes)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            for line in whole.splitlines():
                self._ledger.add(json.loads(line))
            self._read_bytes += len(whole)
            if len(whole) < len(data):
                file.truncate(self._read_bytes)

    def _append(self, **line: Any) -> None:
        is_new = not self._journal.exists()
        with self._journal.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            disk.flush(self._folder)
        self._read()

    @property
    def _journal(self) -> Path:
        return self._folder / "journal.jsonl"

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:06d}.msgpack"


def _fits(asked: Round, versions: Versions) -> bool:
    return versions is None or asked.oldest <= versions[0] <= versions[1] <= asked.newest


def _same(known: tuple[int, str], key: str, digest: str) -> int:
    number, before = known
    if digest != before:
        raise Conflict(
            f"the key {key!r:.80} was used before with another body, as group {number}; expected "
            "the same body, or another key",
            code="body_differs",
        )
    return number


POLL_S = 0.2
"""Seconds between two checks for groups that other processes accepted."""


class PushedGroups:
    """The `GroupSource` of the pushed job in the run folder `run`. A step holds `turn` until it has
    its groups, so steps get groups in their order."""

    def __init__(self, run: Path, status: AttemptStatus) -> None:
        self._queue = PushedQueue(run)
        self._status = status
        self.turn = asyncio.Lock()

    async def take(self, asked: Round) -> list[ScoredGroup]:
        """Returns the groups of a round. Waits for them without a limit."""
        numbers, is_whole = await write_despite_cancel(self._queue.take, asked)
        while not is_whole:
            numbers, is_whole = await self._after(len(numbers), asked)
        return [await asyncio.to_thread(self._queue.group, number) for number in numbers]

    async def _after(self, num_here: int, asked: Round) -> tuple[list[int], bool]:
        """As `take`, once the queue has more than `num_here` groups for the round."""
        what = f"{num_here} of the {asked.count} that step {asked.step} needs are here"
        with self._status.on("pushed groups", what):
            while True:
                await asyncio.sleep(POLL_S)
                numbers, is_whole = await write_despite_cancel(self._queue.take, asked)
                if len(numbers) != num_here:
                    return numbers, is_whole
