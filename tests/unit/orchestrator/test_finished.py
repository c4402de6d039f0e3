"""Finished groups on disk: as they were written, and only for the job that sampled them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from services.orchestrator.record import finished
from services.orchestrator.record.finished import Damaged, FinishedGroup
from services.orchestrator.record.folder import RunFolder
from shared.job import Job
from shared.wire import Prompt, Rollout, RolloutGroup, Score, Span

JOB = Job.model_validate(
    {
        "name": "demo",
        "model": "m/m",
        "steps": 1,
        "data": {"train": "x"},
        "rewards": [{"grader": "length"}],
    }
)
LEARNED = finished.digest_of(JOB)
MESSAGES = ({"role": "user", "content": "3 5 15"},)
PROMPT = Prompt(index=3, content=MESSAGES, row={"target": math.nan})


def made(*versions: int) -> FinishedGroup:
    rollouts = tuple(
        Rollout(
            text="3*5",
            token_ids=(1, 2),
            logprobs=(-0.5, -0.25),
            finish_reason="stop",
            spans=(Span(version=version, start=0),),
        )
        for version in versions
    )
    group = RolloutGroup(prompt_token_ids=(7,), rollouts=rollouts)
    scores = (Score(value=1.0, parts={}),) * len(rollouts)
    return FinishedGroup(learned=LEARNED, prompt=PROMPT, group=group, scores=scores)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo-1")
    folder.create(JOB)
    return folder


def test_a_group_comes_back_as_it_went_at_its_place_only(folder: RunFolder) -> None:
    folder.write_group(12, (0, 3), made(10, 11))
    found = folder.group(12, (0, 3))
    assert found and (found.group, found.scores) == (made(10, 11).group, made(10, 11).scores)
    assert found.versions == {10, 11} and found.is_of(LEARNED, PROMPT), "a row may hold NaN"
    others = [(12, (1, 3)), (12, (0, 4)), (12, (0, 33)), (11, (0, 3))]
    assert [folder.group(step, place) for step, place in others] == [None] * 4


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"steps": 9}, True),
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
        folder.write_group(6, (0, position), group)
    folder.start_at(4)
    assert [folder.group(6, (0, position)) is None for position in range(4)] == [
        *(False, False, False),
        True,
    ]
    folder.start_at(3)
    assert [folder.group(6, (0, position)) is None for position in range(4)] == [
        False,
        *(True, True, True),
    ]


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 200])
def test_a_damaged_group_is_said_once_and_is_gone(folder: RunFolder, damage: bytes) -> None:
    folder.write_group(1, (0, 0), made(0))
    (path,) = (folder.path / "rollouts/000001.groups").iterdir()
    path.write_bytes(damage)
    with pytest.raises(Damaged, match=r"000001\.groups/0-0\.v0\.msgpack' is damaged"):
        folder.group(1, (0, 0))
    assert folder.group(1, (0, 0)) is None


def test_a_group_takes_the_place_of_one_that_older_weights_sampled(folder: RunFolder) -> None:
    for version in (3, 11):
        folder.write_group(12, (0, 3), made(version))
    names = [path.name for path in (folder.path / "rollouts/000012.groups").iterdir()]
    assert names == ["0-3.v11.msgpack"]
