"""The finished groups of steps that are being sampled, on disk as they come: what a crash costs is
what was under way.

    rollouts/000012.groups/0-3.v11.msgpack    round 0, position 3, newest version that sampled it

A file is complete or absent, and begins with a checksum. The groups of a step go once its batch is
stored, which is the truth from then on.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from shared import codec, disk
from shared.errors import BadRequest
from shared.job import Job
from shared.job.learned import learned
from shared.wire import Prompt, RolloutGroup, Score, Wire

STEP_FOLDER = re.compile(r"(\d+)\.groups")
GROUP_FILE = re.compile(r"(\d+-\d+)\.v(\d+)\.msgpack")
CHECKSUM_BYTES = 8

Place = tuple[int, int]
"""Of a group in its step: which round of sampling, and its position there."""


class Damaged(Exception):
    """A stored group that cannot be read, and why, in a sentence."""


class FinishedGroup(Wire):
    """A sampled and scored group of a step. `learned` is the digest of what the job learns."""

    learned: str
    prompt: Prompt
    group: RolloutGroup
    scores: tuple[Score, ...]
    schema_version: int = 1

    @property
    def versions(self) -> set[int]:
        """The weight versions that sampled it."""
        return {version for rollout in self.group.rollouts for version in rollout.versions}

    @property
    def has_samples(self) -> bool:
        """Whether there is a rollout that may be graded and trained on."""
        return any(not rollout.went_wrong for rollout in self.group.rollouts)

    def is_of(self, learned: str, prompt: Prompt) -> bool:
        """Whether a job that learns what has the digest `learned` would sample just this: the same
        prompt, by the same settings. As bytes, for a row may hold NaN, which equals nothing."""
        same_prompt = codec.pack(self.prompt) == codec.pack(prompt)
        return same_prompt and self.learned == learned


def digest_of(job: Job) -> str:
    """Returns a digest of what the job learns."""
    return xxhash.xxh3_64_hexdigest(json.dumps(learned(job)).encode())


def write(rollouts: Path, step: int, place: Place, finished: FinishedGroup) -> None:
    """Stores the group, which some weights sampled, in place of another one at its place."""
    folder = _folder(rollouts, step)
    disk.make_folder(folder)
    data = codec.encode(finished, codec.MSGPACK)
    path = folder / f"{_name(place)}.v{max(finished.versions)}.msgpack"
    disk.write_file(path, _checksum(data) + data)
    for other in folder.glob(f"{_name(place)}.v*.msgpack"):
        if other != path:
            other.unlink(missing_ok=True)


def find(rollouts: Path, step: int, place: Place) -> Path | None:
    """Returns the group's file, if it is stored."""
    return next(_folder(rollouts, step).glob(f"{_name(place)}.v*.msgpack"), None)


def read(path: Path) -> FinishedGroup:
    """Raises Damaged for a file that is not as it was written."""
    data = path.read_bytes()
    checksum, data = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if checksum != _checksum(data):
        raise Damaged(f"the stored group {str(path)!r} is damaged: its checksum differs")
    try:
        return codec.decode_stored(FinishedGroup, data, codec.MSGPACK)
    except BadRequest as error:
        raise Damaged(f"the stored group {str(path)!r} cannot be read: {error.detail}") from error


def forget(rollouts: Path, step: int) -> None:
    """Removes the step's groups, and those of earlier steps."""
    for other, folder in _step_folders(rollouts):
        if other <= step:
            shutil.rmtree(folder, ignore_errors=True)


def forget_newer(rollouts: Path, version: int) -> None:
    """Removes the groups that weights newer than `version` had a part in: the trainer went back,
    and will make others of the same number."""
    for _, folder in _step_folders(rollouts):
        for found, path in _files(folder):
            if int(found[2]) > version:
                path.unlink(missing_ok=True)


def _folder(rollouts: Path, step: int) -> Path:
    return rollouts / f"{step:06d}.groups"


def _name(place: Place) -> str:
    return "-".join(map(str, place))


def _step_folders(rollouts: Path) -> Iterator[tuple[int, Path]]:
    for folder in rollouts.glob("*.groups"):
        if found := STEP_FOLDER.fullmatch(folder.name):
            yield int(found[1]), folder


def _files(folder: Path) -> Iterator[tuple[re.Match[str], Path]]:
    for path in folder.glob("*.msgpack"):
        if found := GROUP_FILE.fullmatch(path.name):
            yield found, path


def _checksum(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)
