"""Stores the groups of a step that is being sampled, each as soon as it is finished. So a crash
costs only the groups under way.

    rollouts/000012.groups/000003.v11.msgpack    the third file, newest version that sampled any

Groups that finish together share one file, because each file waits for the disk. A file is complete
or absent, and begins with a checksum. A step's groups are removed once its batch is stored; the
batch is the truth from then on.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import xxhash

from shared.errors import BadRequest
from shared.host import disk
from shared.http import codec
from shared.job import Job
from shared.job.job import learned
from shared.wire import Prompt, ScoredGroup, Wire

STEP_FOLDER = re.compile(r"(\d+)\.groups")
GROUPS_FILE = re.compile(r"(\d+)\.v(\d+)\.msgpack")
CHECKSUM_BYTES = 8

Place = tuple[int, int]
"""A group's place in its step: the round of sampling, and the position in the round."""


class FinishedGroup(ScoredGroup):
    """A stored group of a step. `learned` is the digest of the settings that decide learning."""

    learned: str
    schema_version: int = 1

    @property
    def versions(self) -> set[int]:
        """The weight versions that sampled the group."""
        return {version for rollout in self.group.rollouts for version in rollout.versions}

    @property
    def has_samples(self) -> bool:
        """Whether the group has a rollout that may be graded and trained on."""
        return any(not rollout.went_wrong for rollout in self.group.rollouts)

    def is_of(self, settings_digest: str, prompt: Prompt) -> bool:
        """Whether the group was sampled for this prompt by a job with these settings. Compares
        bytes, because a row may hold NaN, which equals nothing."""
        same_prompt = codec.pack(self.prompt) == codec.pack(prompt)
        return same_prompt and self.learned == settings_digest


class FinishedGroups(Wire):
    """A file of groups. `places` `[N]` are the places of `groups` `[N]`."""

    places: tuple[Place, ...]
    groups: tuple[FinishedGroup, ...]
    schema_version: int = 1


def digest_of(job: Job) -> str:
    """Returns the digest of the settings that decide what the job learns."""
    return xxhash.xxh3_64_hexdigest(json.dumps(learned(job)).encode())


def write(rollouts: Path, step: int, groups: Mapping[Place, FinishedGroup]) -> None:
    """Stores groups as one file. They replace earlier groups at their places. Each must have been
    sampled by some weights."""
    folder = _folder(rollouts, step)
    disk.make_folder(folder)
    number = 1 + max((int(match[1]) for match, _ in _files(folder)), default=0)
    version = max(version for group in groups.values() for version in group.versions)
    stored = FinishedGroups(places=tuple(groups), groups=tuple(groups.values()))
    data = codec.encode(stored, codec.MSGPACK)
    disk.write_file(folder / f"{number:06d}.v{version}.msgpack", checksum(data) + data)


def read(rollouts: Path, step: int) -> tuple[dict[Place, FinishedGroup], list[str]]:
    """Returns the step's groups by place, and a sentence for each damaged file. Damaged files are
    removed."""
    groups: dict[Place, FinishedGroup] = {}
    damaged: list[str] = []
    for _, path in sorted(_files(_folder(rollouts, step)), key=lambda each: int(each[0][1])):
        stored = _stored(path)
        if isinstance(stored, FinishedGroups):
            groups |= zip(stored.places, stored.groups, strict=True)
        else:
            damaged.append(stored)
            path.unlink(missing_ok=True)
    return groups, damaged


def _stored(path: Path) -> FinishedGroups | str:
    """Returns the file's groups, or a sentence saying why it cannot be read."""
    data = path.read_bytes()
    stored_checksum, data = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if stored_checksum != checksum(data):
        return f"the file of groups {str(path)!r} is damaged: its checksum differs"
    try:
        return codec.decode_tolerantly(FinishedGroups, data, codec.MSGPACK)
    except BadRequest as error:
        return f"the file of groups {str(path)!r} cannot be read: {error.detail}"


def forget(rollouts: Path, step: int) -> None:
    """Removes the step's groups."""
    shutil.rmtree(_folder(rollouts, step), ignore_errors=True)


def forget_up_to(rollouts: Path, step: int) -> None:
    """Removes the groups of the step and of earlier steps."""
    for other, folder in _step_folders(rollouts):
        if other <= step:
            shutil.rmtree(folder, ignore_errors=True)


def forget_newer(rollouts: Path, version: int) -> None:
    """Removes every file with a group that weights newer than `version` helped to sample: the
    trainer went back to that version, and will make other weights with the same numbers."""
    for _, folder in _step_folders(rollouts):
        for match, path in _files(folder):
            if int(match[2]) > version:
                path.unlink(missing_ok=True)


def _folder(rollouts: Path, step: int) -> Path:
    return rollouts / f"{step:06d}.groups"


def _step_folders(rollouts: Path) -> Iterator[tuple[int, Path]]:
    for folder in rollouts.glob("*.groups"):
        if match := STEP_FOLDER.fullmatch(folder.name):
            yield int(match[1]), folder


def _files(folder: Path) -> Iterator[tuple[re.Match[str], Path]]:
    for path in folder.glob("*.msgpack"):
        if match := GROUPS_FILE.fullmatch(path.name):
            yield match, path


def checksum(data: bytes) -> bytes:
    """Returns the `CHECKSUM_BYTES` that stand before data in a file of the run folder."""
    return xxhash.xxh3_64_digest(data)
