"""Finished groups on disk: as they were written, and only for the job that sampled them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.orchestrator.grpo.batches import GroupWriter
from services.orchestrator.store import finished
from services.orchestrator.store.finished import FinishedGroup, Place
from services.orchestrator.store.folder import RunFolder
from shared.errors import Failed
from shared.job import Job
from shared.wire import Prompt, RolloutGroup, Score
from tests.support.job_records import JOB
from tests.support.scored_batches import make_rollout

LEARNED = finished.digest_of(JOB)
MESSAGES = ({"role": "user", "content": "3 5 15"},)
PROMPT = Prompt(index=3, content=MESSAGES, row={"target": math.nan})


def made(*versions: int) -> FinishedGroup:
    rollouts = tuple(make_rollout(2, versions=(version,)) for version in versions)
    group = RolloutGroup(prompt_token_ids=(7,), rollouts=rollouts)
    scores = (Score(value=1.0, parts={}),) * len(rollouts)
    return FinishedGroup(learned=LEARNED, prompt=PROMPT, group=group, scores=scores)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo-1")
    folder.create(JOB)
    return folder


def test_a_group_comes_back_as_it_went_at_its_place_only(folder: RunFolder) -> None:
    folder.write_groups(12, {(0, 3): made(10, 11), (1, 4): made(10)})
    groups, damaged = folder.groups(12)
    assert (sorted(groups), damaged) == ([(0, 3), (1, 4)], [])
    found = groups[0, 3]
    assert (found.group, found.scores) == (made(10, 11).group, made(10, 11).scores)
    assert found.versions == {10, 11} and found.is_of(LEARNED, PROMPT), "a row may hold NaN"
    assert folder.groups(11) == ({}, [])


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"steps": 10}, True),
        ({"evaluation": {"every": 3}}, True),
        ({"seed": 1}, False),
        ({"sampling": {"temperature": 0.5}}, False),
        ({"rewards": [{"grader": "exact_match"}]}, False),
    ],
)
def test_a_group_is_only_of_a_job_that_learns_the_same(
    changes: dict[str, object], same: bool
) -> None:
    job = Job.model_validate({**JOB.model_dump(mode="json"), **changes})
    assert made(0).is_of(finished.digest_of(job), PROMPT) is same


def test_a_group_is_only_of_the_prompt_that_it_was_sampled_for() -> None:
    assert not made(0).is_of(LEARNED, PROMPT.model_copy(update={"index": 4}))
    assert not made(0).is_of(LEARNED, PROMPT.model_copy(update={"row": {"target": 1}}))


def test_a_version_that_is_undone_takes_its_groups_along(folder: RunFolder) -> None:
    for position, group in enumerate([made(3), made(3, 4), made(4), made(5)]):
        folder.write_groups(6, {(0, position): group})
    folder.start_at(4)
    assert sorted(folder.groups(6)[0]) == [(0, 0), (0, 1), (0, 2)]
    folder.start_at(3)
    assert sorted(folder.groups(6)[0]) == [(0, 0)]


def test_no_group_is_left_of_a_file_that_holds_one_of_an_undone_version(folder: RunFolder) -> None:
    folder.write_groups(6, {(0, 0): made(3), (0, 1): made(5)})
    folder.start_at(4)
    assert folder.groups(6) == ({}, [])


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 200])
def test_a_damaged_file_is_said_once_and_is_gone(folder: RunFolder, damage: bytes) -> None:
    folder.write_groups(1, {(0, 0): made(0), (0, 1): made(0)})
    folder.write_groups(1, {(0, 2): made(0)})
    first, _ = sorted((folder.path / "rollouts/000001.groups").iterdir())
    first.write_bytes(damage)
    groups, (sentence,) = folder.groups(1)
    assert sentence.endswith("000001.groups/000001.v0.msgpack' is damaged: its checksum differs")
    assert list(groups) == [(0, 2)]
    groups, damaged = folder.groups(1)
    assert (list(groups), damaged) == ([(0, 2)], [])


def test_a_group_takes_the_place_of_one_that_older_weights_sampled(folder: RunFolder) -> None:
    for version in (11, 3):  # whichever was written last
        folder.write_groups(12, {(0, 3): made(version)})
    assert folder.groups(12)[0][0, 3].versions == {3}


async def written_while_one_is(
    *, failing: int | None = None
) -> tuple[list[list[Place]], list[BaseException | None]]:
    """Adds the group at place 0, and those at 1 to 3 while it is written. Returns the places of
    each write, of which the one numbered `failing` fails, and what each `add` raised."""
    writes: list[list[Place]] = []
    begun, go_on = threading.Event(), threading.Event()

    def write(groups: Mapping[Place, FinishedGroup]) -> None:
        writes.append(list(groups))
        begun.set()
        assert go_on.wait(20)
        if len(writes) == failing:
            raise Failed("the disk is full")

    writer = GroupWriter(write)
    first = asyncio.create_task(writer.add((0, 0), made(0)))
    await asyncio.to_thread(begun.wait, 20)
    others = [asyncio.create_task(writer.add((0, place), made(0))) for place in (1, 2, 3)]
    await asyncio.sleep(0)
    go_on.set()
    return writes, await asyncio.gather(first, *others, return_exceptions=True)


async def test_groups_that_come_while_one_is_written_are_written_together() -> None:
    writes, errors = await written_while_one_is()
    assert errors == [None] * 4
    assert writes == [[(0, 0)], [(0, 1), (0, 2), (0, 3)]]


async def test_groups_whose_write_fails_are_not_taken_for_written() -> None:
    writes, errors = await written_while_one_is(failing=2)
    assert [isinstance(error, Failed) for error in errors] == [False, True, False, False]
    assert writes == [[(0, 0)], [(0, 1), (0, 2), (0, 3)], [(0, 1), (0, 2), (0, 3)]]


async def test_what_was_sampled_is_on_disk_when_the_work_that_was_cancelled_has_ended() -> None:
    written: list[Place] = []
    begun = threading.Event()

    def write(groups: Mapping[Place, FinishedGroup]) -> None:
        begun.set()
        time.sleep(0.05)
        written.extend(groups)

    writer = GroupWriter(write)
    adding = [asyncio.create_task(writer.add((0, place), made(0))) for place in range(3)]
    await asyncio.to_thread(begun.wait, 20)
    for task in adding:
        task.cancel()
    ended = await asyncio.gather(*adding, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    assert written == [(0, 0), (0, 1), (0, 2)]
