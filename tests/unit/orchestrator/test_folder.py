"""The run folder: complete or absent, and a sentence when the disk is not there. And whether the
folder of runs can be written."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.orchestrator import writable
from services.orchestrator.jobs.results import oldest_needed_batch
from services.orchestrator.store.finished import FinishedGroup
from services.orchestrator.store.folder import BatchExists, RunFolder
from services.orchestrator.writable import RunsDirCheck, make_runs_dir, why_not_writable
from shared.errors import Conflict, Failed, NotFound
from shared.job import CheckpointSpec, RolloutsSpec
from shared.wire import (
    Batch,
    GradedRollout,
    Logprobs,
    MetricsRow,
    Prompt,
    RolloutGroup,
    Score,
    TrainedTokens,
)
from tests.support.job_records import JOB
from tests.support.scored_batches import make_rollout


def make_batch(step: int = 1, text: str = "3*5") -> Batch:
    group = RolloutGroup(prompt_token_ids=(7,), rollouts=(make_rollout(2, text=text),))
    prompt = Prompt(index=0, content="3 5 15", row={"target": 15})
    return Batch(
        step=step,
        version=0,
        prompts=(prompt,),
        groups=(group,),
        scores=((Score(value=1.0, parts={}),),),
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo-1")
    folder.create(JOB)
    return folder


def test_a_batch_comes_back_as_it_went(folder: RunFolder) -> None:
    folder.write_batch(make_batch(12))
    assert folder.batch(12) == make_batch(12) and folder.batch_steps() == [12]
    with pytest.raises(NotFound, match="step 3 has no stored rollouts; steps 12 to 12 have"):
        folder.batch(3)


def test_what_the_trainer_said_of_tokens_goes_with_its_batch(folder: RunFolder) -> None:
    assert folder.trained(1) is None
    for step in (1, 2):
        folder.write_batch(make_batch(step))
        column = ((Logprobs((-0.5, math.nan)),),)
        folder.write_trained(TrainedTokens(step=step, logprobs=column, entropies=column))
    told = folder.trained(1)
    assert told and told.logprobs[0][0].data == struct.pack("<ff", -0.5, math.nan)
    assert folder.batch_steps() == [1, 2]
    folder.prune_batches(2)
    assert folder.trained(1) is None and folder.trained(2) and folder.batch_steps() == [2]


def test_a_folder_of_a_job_that_learns_something_else_is_refused_by_name(folder: RunFolder) -> None:
    folder.create(JOB.model_copy(update={"steps": 10}))
    assert json.loads((folder.path / "job.json").read_text())["steps"] == 10, "that may change"
    rewards = (JOB.rewards[0].model_copy(update={"source": "x" * 100, "file": "r.py"}),)
    with pytest.raises(Conflict) as refusal:
        folder.create(JOB.model_copy(update={"rewards": rewards, "seed": 1}))
    assert refusal.value.detail == (
        f"{str(folder.path / 'job.json')!r} is of the same job id with another job: "
        "rewards.0.file was None and is 'r.py'; "
        f"rewards.0.source was None and is '{'x' * 59}...; "
        "seed was 0 and is 1; continuing would contradict the stored steps: restore that file, or "
        "submit the job again"
    )


def test_an_older_run_that_continues_does_not_take_the_name_back(tmp_path: Path) -> None:
    for job_id in ("demo-1", "demo-2", "demo-1"):
        RunFolder(tmp_path / job_id).create(JOB)
    assert (tmp_path / "demo").resolve().name == "demo-2"
    RunFolder(tmp_path / "demo-2").remove()
    RunFolder(tmp_path / "demo-1").create(JOB)
    assert (tmp_path / "demo").resolve().name == "demo-1"


def test_a_folder_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    RunFolder(tmp_path / "demo-1").create(JOB)
    assert not (tmp_path / "demo").is_symlink()


def test_steps_that_will_be_done_again_are_dropped(folder: RunFolder) -> None:
    for step in range(4):
        folder.append_metrics(MetricsRow(step=step, metrics={}))
    assert folder.start_at(1) == 1
    folder.append_metrics(MetricsRow(step=2, metrics={}))
    assert [row.step for row in folder.metrics()] == [0, 1, 2]


def test_a_row_of_metrics_that_a_crash_cut_short_is_passed_over(
    folder: RunFolder,
) -> None:
    rewards = {1: 0.5, 2: 0.75, 3: 1.0}
    for step, reward in rewards.items():
        folder.append_metrics(MetricsRow(step=step, metrics={"reward": reward}))
        with (folder.path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 9, "rew')
    assert {row.step: row.metrics["reward"] for row in folder.metrics()} == rewards
    assert [row.step for row in folder.metrics(after_step=1)] == [2, 3]


def test_a_row_that_a_superseded_worker_wrote_late_is_not_a_second_row(folder: RunFolder) -> None:
    for step, seconds in ((0, 1.0), (1, 1.0), (2, 1.0), (1, 30.0)):
        folder.append_metrics(MetricsRow(step=step, metrics={"seconds": seconds}))
    found = [(row.step, row.metrics["seconds"]) for row in folder.metrics()]
    assert found == [(0, 1.0), (1, 1.0), (2, 1.0)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_a_sentence_and_leaves_no_half_file(small_disk: Path) -> None:
    folder = RunFolder(small_disk / "demo-1")
    folder.create(JOB)
    with pytest.raises(Failed, match=r"the disk of run folder '.*demo-1' is full \(\d+ MiB free\)"):
        folder.write_batch(make_batch(1, text="x" * 400_000))
    assert list((folder.path / "rollouts").iterdir()) == []
    folder.write_batch(make_batch(1))
    assert folder.batch(1) == make_batch(1)


def test_a_run_folder_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Failed, match="HONE_RUNS_DIR"):
        RunFolder(tmp_path / "file" / "demo-1").create(JOB)


def test_a_scored_batch_is_written_once(folder: RunFolder) -> None:
    folder.write_batch(make_batch(2))
    folder.write_batch(make_batch(2))
    with pytest.raises(BatchExists, match="another batch of step 2 is stored"):
        folder.write_batch(make_batch(2, text="another worker's"))
    assert folder.batch(2) == make_batch(2)
    assert [path.name for path in (folder.path / "rollouts").iterdir()] == ["000002.msgpack"]


def test_a_batch_with_a_column_that_is_not_a_number_is_the_same_batch_again(
    folder: RunFolder,
) -> None:
    prompt = Prompt(index=0, content="3 5 15", row={"target": float("nan")})
    folder.write_batch(make_batch(2).model_copy(update={"prompts": (prompt,)}))
    folder.write_batch(folder.batch(2))


def test_a_batch_waits_under_another_name_until_it_is_graded(folder: RunFolder) -> None:
    waiting = make_batch(3).model_copy(update={"graded": False})
    for text in ("3*5", "again"):
        folder.write_batch(waiting.model_copy(update={"groups": make_batch(3, text).groups}))
    assert not folder.batch(3).graded and folder.batch(3).groups == make_batch(3, "again").groups
    assert folder.batch_steps() == [3]
    folder.write_batch(make_batch(3))
    assert folder.batch(3) == make_batch(3) and folder.batch_steps() == [3]
    folder.write_batch(waiting)  # by a worker that was superseded
    assert folder.batch(3) == make_batch(3)


def test_a_batch_that_waits_leaves_an_earlier_step_that_is_sampled_its_groups(
    folder: RunFolder,
) -> None:
    made = make_batch(0)
    group = FinishedGroup(
        learned="x", prompt=made.prompts[0], group=made.groups[0], scores=made.scores[0]
    )
    for step in (3, 4):
        folder.write_groups(step, {(0, 0): group})
    folder.write_batch(make_batch(4).model_copy(update={"graded": False}))
    assert [len(folder.groups(step)[0]) for step in (3, 4)] == [1, 0]
    folder.write_groups(2, {(0, 0): group})
    folder.write_batch(make_batch(3))
    assert [len(folder.groups(step)[0]) for step in (2, 3)] == [0, 0], "steps are trained in order"


@pytest.mark.parametrize("name", ["", "hard"])
def test_held_out_completions_are_kept_with_their_steps(folder: RunFolder, name: str) -> None:
    for step in (0, 10, 20, 30):
        folder.append_metrics(MetricsRow(step=step, metrics={}))
        folder.write_held_out(name, step, ())
    folder.start_at(20)
    with pytest.raises(
        NotFound, match=r"step 30 has no stored .*; stored: steps 0, 10, 20\. They exist after"
    ):
        folder.held_out(name, 30)
    assert folder.held_out(name, None).step == 20, "30 was of weights that are gone"
    folder.prune_batches(15)
    assert [folder.held_out(name, step).step for step in (0, 20)] == [0, 20]
    with pytest.raises(NotFound, match=r"step 10 has no stored .*; stored: steps 0, 20\. "):
        folder.held_out(name, 10)


def test_a_line_after_a_cut_one_is_read_and_on_disk(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = list[str]()

    def fsync(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", fsync)
    file = folder.path / "weights.jsonl"
    file.write_bytes(b'{"version": 1}\n{"versi')
    folder.append_sync({"version": 2})
    folder.append_sync({"version": 3})
    assert flushed == ["weights.jsonl"] * 2
    assert folder.syncs() == [{"version": version} for version in (1, 2, 3)]
    assert file.read_bytes() == b'{"version": 1}\n{"versi\n{"version": 2}\n{"version": 3}\n'


def test_a_held_out_prompt_is_stored_once_for_its_completions(folder: RunFolder) -> None:
    def completion(index: int, prompt: str, text: str) -> GradedRollout:
        return GradedRollout(
            prompt_index=index,
            prompt=prompt,
            completion=text,
            finish_reason="stop",
            versions=(3,),
            reward=1.0,
            parts={},
            advantage=None,
        )

    of_two = [("0?" * 1000, 0), ("", 1), ("0?" * 1000, 2)]  # an empty prompt, and an equal one
    rollouts = tuple(
        completion(index, prompt, f"{number}") for prompt, index in of_two for number in range(2)
    )
    folder.write_held_out("", 3, rollouts)
    (file,) = (folder.path / "held_out").iterdir()
    assert file.read_bytes().count(b"0?" * 1000) == 2
    assert folder.held_out("", 3).rollouts == rollouts


def test_a_folder_is_removed_with_the_name_that_points_at_it(tmp_path: Path) -> None:
    for job_id in ("demo-1", "demo-2"):
        RunFolder(tmp_path / job_id).create(JOB)
    for _ in range(2):
        RunFolder(tmp_path / "demo-1").remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo-2"]
    RunFolder(tmp_path / "demo-2").remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keep", "every", "keep_last", "checkpoint", "first"),
    [
        (0, 50, 2, 500, 1),  # all are kept
        (10, 50, 2, 500, 451),  # replayed from the checkpoint of step 450
        (10, 50, 1, 500, 491),
        (100, 50, 2, 500, 401),
        (10, 50, 2, 520, 501),  # the checkpoints of the last step and of step 500
        (10, 50, 3, 520, 451),
        (10, 50, 2, 50, 1),  # the older one is the start
        (10, 0, 2, 500, 1),  # there is only the last one
        (10, 0, 1, 500, 491),
    ],
)
def test_batches_are_kept_that_a_restart_may_replay(
    keep: int, every: int, keep_last: int, checkpoint: int, first: int
) -> None:
    job = JOB.model_copy(
        update={
            "rollouts": RolloutsSpec(keep_last=keep),
            "checkpoints": CheckpointSpec(every=every, keep_last=keep_last),
        }
    )
    assert oldest_needed_batch(job, checkpoint) == first


def test_a_job_that_another_redis_has_is_not_gone_on_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "demo-1")
    folder.create(JOB, redis="old")
    folder.create(JOB, redis="old")
    folder.set_redis("new")
    with pytest.raises(Conflict, match="in another Redis now"):
        folder.create(JOB, redis="old")
    folder.create(JOB, redis="new")


def test_verdicts_come_back_whatever_a_crash_cut_short(folder: RunFolder) -> None:
    assert folder.verdicts() == {}
    folder.append_verdicts(1, {7: "right", 8: "mixed"})
    with (folder.path / "difficulty.jsonl").open("a") as file:
        file.write('\n{"step": 2, "verd\n' + "\0" * 6)  # zeros: the power went
    assert folder.verdicts() == {1: {7: "right", 8: "mixed"}}
    folder.append_verdicts(2, {9: "wrong"})
    folder.append_verdicts(1, {7: "wrong"})
    assert folder.verdicts() == {1: {7: "wrong"}, 2: {9: "wrong"}}


def test_a_folder_that_can_be_written_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a-run").mkdir()

    assert why_not_writable(tmp_path) is None
    assert os.listdir(tmp_path) == ["a-run"]  # noqa: PTH208


def test_a_folder_that_is_missing_stays_missing(tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"

    assert why_not_writable(runs_dir) == (
        f"folder {str(runs_dir)!r} does not exist; mount its volume, or check HONE_RUNS_DIR"
    )
    assert not runs_dir.exists()


def test_the_folder_is_made_in_one_that_is_there(tmp_path: Path) -> None:
    make_runs_dir(tmp_path / "runs")
    make_runs_dir(tmp_path / "runs")

    assert why_not_writable(tmp_path / "runs") is None


def test_the_folder_is_not_made_where_the_one_above_is_missing(tmp_path: Path) -> None:
    runs_dir = tmp_path / "volume/runs"

    with pytest.raises(Failed) as refusal:
        make_runs_dir(runs_dir)
    assert refusal.value.detail == (
        f"cannot write to folder {str(runs_dir)!r}: No such file or directory; check HONE_RUNS_DIR"
    )
    assert not (tmp_path / "volume").exists()


async def test_a_folder_that_hangs_is_said_to_take_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(writable, "why_not_writable", lambda _: answers.wait(60))

    assert await RunsDirCheck(tmp_path, answers_within_s=0.05).why_not() == (
        f"folder {str(tmp_path)!r} could not be written within 0.05 s; check HONE_RUNS_DIR "
        "and its disk"
    )
    answers.set()
