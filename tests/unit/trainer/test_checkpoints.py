"""Checkpoints: whole or absent, found again, refused to others, damaged ones named, old ones
removed. One rank and two."""

import contextlib
import errno
import json
import os
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest

from services.trainer.disk import checkpoints, folders
from services.trainer.disk.checkpoints import check_seen as seen
from services.trainer.disk.checkpoints import expendable
from services.trainer.engine import OutOfMemory, PassBudget
from services.trainer.loaded import checkpoint_bytes
from shared.errors import Conflict, Failed, Unavailable
from shared.job import CheckpointSpec, EvaluationSpec, MemorySpec, WandbSpec
from shared.wire import CheckpointRequest, PublishRequest
from tests.support.engine_ranks import warm
from tests.support.safetensors_files import safetensors
from tests.support.trainer_fakes import (
    EXAMPLE,
    ThreadRanks,
    Together,
    job_request,
    loaded_trainer,
    make_trainer,
    on_all,
    step_request,
)


def checkpoint(step: int, job_id: str = "a") -> CheckpointRequest:
    return CheckpointRequest(job_id=job_id, step=step)


def trained(tmp_path, steps: int, *, every: int = 1, job_id: str = "a", **job):
    """A trainer that has trained that many steps and written a checkpoint every so many."""
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request(job_id, **job))
    for step in range(1, steps + 1):
        trainer.train_step(step_request(step, job_id=job_id))
        if step % every == 0:
            trainer.write_checkpoint(checkpoint(step, job_id))
    return trainer, engines


def in_steps(tmp_path, job_id: str = "a") -> list[int]:
    return [
        found.step
        for found in checkpoints.list_checkpoints(tmp_path / "runs" / job_id / "checkpoints")
    ]


def test_a_checkpoint_is_written_once_and_found_later(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    trainer.train_step(step_request(1))
    first = trainer.write_checkpoint(checkpoint(1))
    assert first is not None and first.path.endswith("runs/a/checkpoints/step-000001")
    engines[0].num_updates = 99  # would be visible in the file
    trainer.train_step(step_request(2))
    assert trainer.write_checkpoint(checkpoint(1)) == first
    assert (
        tmp_path / "runs/a/checkpoints/step-000001/model.safetensors"
    ).read_bytes() == safetensors(w=b"weights 1")
    with pytest.raises(Conflict, match="got step 5, expected 2"):
        trainer.write_checkpoint(checkpoint(5))
    assert trainer.list_checkpoints().checkpoints == (first,)
    assert first.size_bytes == sum(
        file.stat().st_size for file in Path(first.path).rglob("*") if file.is_file()
    )


def test_a_job_continues_from_its_newest_checkpoint_and_answers_its_step_again(tmp_path):
    first, engines = trained(tmp_path, 4, every=2)
    last = first.train_step(step_request(4))
    first.train_step(step_request(5))
    second, engines = make_trainer(tmp_path)
    state = second.load_job(job_request())
    assert (state.step, state.resumed_step, state.damaged) == (4, 4, ())
    assert engines[0].num_updates == 4
    assert second.train_step(step_request(4)) == last
    assert engines[0].num_updates == 4, "answered, not applied"
    with pytest.raises(Conflict, match="step 4 was already applied, with another body"):
        second.train_step(step_request(4, examples=(EXAMPLE, EXAMPLE)))
    assert second.train_step(step_request(5)).step == 5


def test_a_job_that_another_trainer_took_further_continues_from_there(tmp_path):
    first, engines = trained(tmp_path, 2, every=2)
    second, _ = make_trainer(tmp_path)
    second.load_job(job_request())
    for step in (3, 4):
        second.train_step(step_request(step))
    second.write_checkpoint(checkpoint(4))
    state = first.load_job(job_request())
    assert (state.step, state.resumed_step) == (4, 4), "it still had step 2"
    assert engines[0].closed and engines[1].num_updates == 4
    assert first.train_step(step_request(5)).step == 5


def test_the_count_of_skipped_steps_continues_too(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    engines[0].skip = True
    trainer.train_step(step_request(1))
    trainer.write_checkpoint(checkpoint(1))
    assert make_trainer(tmp_path)[0].load_job(job_request()).skipped_steps == 1


def test_a_job_without_checkpoints_begins_at_its_start(tmp_path):
    trained(tmp_path, 2, job_id="b")
    state = make_trainer(tmp_path)[0].load_job(job_request("a"))
    assert (state.step, state.resumed_step) == (0, None)


def test_a_checkpoint_of_another_job_is_refused_and_the_loaded_job_stays(tmp_path):
    trained(tmp_path, 1, job_id="b")
    shutil.copytree(tmp_path / "runs/b", tmp_path / "runs/a")
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request("c"))
    with pytest.raises(
        Conflict, match="it is of job 'b', and this is job 'a'; move it away to start again"
    ):
        trainer.load_job(job_request("a"))
    assert not engines[0].closed
    assert trainer.state().job_id == "c"


def test_a_checkpoint_of_another_body_says_what_differs(tmp_path):
    trained(tmp_path, 1)
    trainer, _ = make_trainer(tmp_path)
    request = job_request(learning_rate=0.2)
    request = request.model_copy(update={"job": request.job.model_copy(update={"seed": 7})})
    with pytest.raises(
        Conflict,
        match=r"with another job: seed was 0 and is 7; "
        r"training\.learning_rate was 0\.1 and is 0\.2;",
    ):
        trainer.load_job(request)


def test_a_checkpoint_of_another_model_is_refused_with_both_fingerprints(tmp_path):
    trained(tmp_path, 1)
    trainer, engines = make_trainer(tmp_path)
    engines.model = "retrained"
    with pytest.raises(
        Conflict, match="what is in 'tiny' had the fingerprint \"tiny's\", and now has 'retrained'"
    ):
        trainer.load_job(job_request())


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (
            lambda path: (path / "model.safetensors").unlink(),
            "model.safetensors cannot be read: No such file or directory",
        ),
        (
            lambda path: os.truncate(path / "trainer/rank-0", 0),
            "trainer/rank-0 has 0 bytes, expected 1",
        ),
        (
            lambda path: (path / "trainer/rank-0").write_text("7"),
            "trainer/rank-0 has other bytes than were written",
        ),
        (
            lambda path: (path / "trainer/manifest.json").unlink(),
            "trainer/manifest.json cannot be read",
        ),
        (
            lambda path: os.truncate(path / "trainer/manifest.json", 100),
            "trainer/manifest.json is incomplete or garbled",
        ),
    ],
    ids=["missing", "truncated", "garbled", "no manifest", "truncated manifest"],
)
def test_a_damaged_checkpoint_is_named_and_the_next_older_taken(tmp_path, damage, fault):
    trained(tmp_path, 2)
    damage(tmp_path / "runs/a/checkpoints/step-000002")
    trainer, engines = make_trainer(tmp_path)
    state = trainer.load_job(job_request())
    assert (state.step, state.resumed_step) == (1, 1)
    assert engines[0].num_updates == 1
    (said,) = state.damaged
    assert said.startswith(f"the checkpoint step-000002 of job 'a' is damaged: {fault}")
    assert in_steps(tmp_path) == [1]
    assert (tmp_path / "runs/a/checkpoints/damaged-step-000002").is_dir()
    trainer.train_step(step_request(2))
    trainer.write_checkpoint(checkpoint(2))
    assert in_steps(tmp_path) == [1, 2], "written again, and not taken for the damaged one"


def test_a_checkpoint_of_another_version_of_hone_is_refused_and_not_called_damaged(tmp_path):
    trained(tmp_path, 1)
    manifest = tmp_path / "runs/a/checkpoints/step-000001/trainer/manifest.json"
    manifest.write_text(manifest.read_text().replace('"skipped_steps"', '"skips"'))
    with pytest.raises(
        Conflict,
        match=r"is of another version of Hone: trainer/manifest\.json: "
        r"skipped_steps: Field required",
    ):
        make_trainer(tmp_path)[0].load_job(job_request())
    assert in_steps(tmp_path) == [1]


def test_a_checkpoint_of_a_newer_format_is_refused_by_its_number(tmp_path):
    trained(tmp_path, 1)
    manifest = tmp_path / "runs/a/checkpoints/step-000001/trainer/manifest.json"
    written = json.loads(manifest.read_text())
    assert written["format"] == 1
    manifest.write_text(json.dumps(written | {"format": 2, "sharded": True}))
    refused = r"manifest\.json: got format 2, expected at most 1; continue"
    with pytest.raises(Conflict, match=refused):
        make_trainer(tmp_path)[0].load_job(job_request())
    assert in_steps(tmp_path) == [1]
    del written["format"]
    manifest.write_text(json.dumps(written))
    assert make_trainer(tmp_path)[0].load_job(job_request()).step == 1


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "keep", "removed"),
    [
        (2, 0, (), [1, 2, 3, 4]),
        (1, 2, (), [1, 3, 5]),
        (1, 4, (), [1, 2, 3, 5]),
        (9, 0, (), []),
        (1, 0, (), [1, 2, 3, 4, 5]),
        (1, 4, (2, 9), [1, 3, 5]),
    ],
)
def test_the_last_are_kept_and_of_older_ones_every_nth_and_those_asked_for(
    keep_last, keep_every, keep, removed
):
    spec = CheckpointSpec(keep_last=keep_last, keep_every=keep_every)
    assert expendable([1, 2, 3, 4, 5, 6], spec, keep) == removed
    assert expendable([], spec) == []


def test_old_checkpoints_are_removed_when_a_new_one_is_whole(tmp_path):
    trainer, engines = trained(tmp_path, 6, checkpoints={"keep_last": 2, "keep_every": 3})
    assert in_steps(tmp_path) == [3, 5, 6]
    trainer.train_step(step_request(7))
    engines[0].save_fault = OSError("the disk broke")
    with pytest.raises(Failed, match=r"cannot write '.*step-000007': the disk broke"):
        trainer.write_checkpoint(checkpoint(7))
    assert in_steps(tmp_path) == [3, 5, 6]
    assert (
        sorted(path.name for path in (tmp_path / "runs/a/checkpoints").iterdir())[0]
        == "step-000003"
    ), "nothing was left aside"


def test_space_for_the_optimizer_is_counted_before_anything_is_written(tmp_path, monkeypatch):
    trainer, engines = loaded_trainer(tmp_path)
    # 40 bytes exported, and 12 for each of 4 trained parameters.
    assert checkpoint_bytes(engines[0]) == 88
    monkeypatch.setattr(
        folders.shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1000, 913, 87)
    )
    with pytest.raises(
        Failed,
        match="about 88 bytes are needed and 87 are free; free some space, or point HONE_RUNS_DIR",
    ):
        trainer.write_checkpoint(checkpoint(0))
    assert in_steps(tmp_path) == []


def test_what_a_killed_trainer_left_aside_is_swept_when_the_job_is_loaded(tmp_path):
    trained(tmp_path, 1)
    (tmp_path / "runs/a/checkpoints/.tmp-step-000002.0123abcd").mkdir()
    (tmp_path / "runs/a/weights/.tmp-v2.0123abcd").mkdir(parents=True)
    (tmp_path / "shm/a/.tmp-v2.0123abcd").mkdir(parents=True)
    make_trainer(tmp_path)[0].load_job(job_request())
    assert [path.name for path in (tmp_path / "runs/a/checkpoints").iterdir()] == ["step-000001"]
    assert list((tmp_path / "runs/a/weights").iterdir()) == []
    assert not (tmp_path / "shm/a").exists()


def two_ranks(tmp_path):
    shared = Together(2)
    return [make_trainer(tmp_path, ThreadRanks(shared, rank)) for rank in range(2)]


def two_loaded_ranks(tmp_path):
    trainers = two_ranks(tmp_path)
    on_both(trainers, "load_job", job_request())
    return trainers


def on_both(trainers, name: str, body):
    return on_all(
        *(lambda trainer=trainer: getattr(trainer, name)(body) for trainer, _ in trainers)
    )


def test_ranks_that_are_behind_the_checkpoints_load_the_job_again_together(tmp_path):
    trainers = two_loaded_ranks(tmp_path)
    trained(tmp_path, 3)
    states = on_both(trainers, "load_job", job_request())
    assert [state.step for state in states] == [3, 3]


def test_every_rank_writes_its_share_and_reads_it_back(tmp_path):
    trainers = two_loaded_ranks(tmp_path)
    on_both(trainers, "train_step", step_request(1))
    trainers[1][1][0].num_updates = 11  # so that the shares differ
    written, nothing = on_both(trainers, "write_checkpoint", checkpoint(1))
    assert (written.step, nothing) == (1, None)
    manifest = checkpoints.read_manifest(Path(written.path))
    assert set(manifest.files) == {
        "config.json",
        "model.safetensors",
        "trainer/rank-0",
        "trainer/rank-1",
    }
    assert manifest.num_ranks == 2
    again = two_ranks(tmp_path)
    states = on_both(again, "load_job", job_request())
    assert [state.step for state in states] == [1, 1]
    assert [engines[0].num_updates for _, engines in again] == [1, 11]


def test_ranks_of_which_one_stops_begin_no_checkpoint_and_wait_for_none(tmp_path):
    trainers = two_loaded_ranks(tmp_path)
    trainers[1][1].stops = True
    refused = on_both(trainers, "write_checkpoint", checkpoint(0))
    assert [type(outcome) for outcome in refused] == [Unavailable, Unavailable]
    assert in_steps(tmp_path) == []


def test_nodes_tell_their_volume_before_each_continues_with_what_the_other_wrote(tmp_path):
    told = tmp_path / "told"
    shared = Together(2)
    nodes = [
        make_trainer(
            tmp_path,
            ThreadRanks(shared, node),
            trainer_nodes=2,
            runs_commit=f"sh -c 'echo commit {node} >> {told}'",
            runs_refresh=f"sh -c 'echo refresh {node} >> {told}'",
        )
        for node in range(2)
    ]
    on_both(nodes, "load_job", job_request())
    assert sorted(told.read_text().split("\n")[:-1]) == ["refresh 0", "refresh 1"]
    told.unlink()
    written, _ = on_both(nodes, "write_checkpoint", checkpoint(0))
    assert written.step == 0
    lines = told.read_text().splitlines()
    phases = [lines[0:1], lines[1:3], lines[3:5], lines[5:7], lines[7:]]
    assert [sorted(phase) for phase in phases] == [
        ["commit 0"],  # the folder
        ["refresh 0", "refresh 1"],
        ["commit 0", "commit 1"],  # each rank's part
        ["refresh 0", "refresh 1"],
        ["commit 0"],  # the whole, under its name
    ]


def test_a_checkpoint_whose_commit_failed_is_committed_when_it_is_asked_for_again(tmp_path):
    told = tmp_path / "told"
    fails_once = f"echo commit >> {told}; test $(wc -l < {told}) -gt 1"
    trainer, _ = make_trainer(tmp_path, runs_commit=f"sh -c '{fails_once}'")
    trainer.load_job(job_request())
    with pytest.raises(Failed, match="the checkpoint cannot be committed"):
        trainer.write_checkpoint(checkpoint(0))
    assert trainer.write_checkpoint(checkpoint(0)).step == 0
    assert told.read_text().splitlines() == ["commit", "commit"]


def test_a_rank_that_cannot_write_its_share_is_an_error_on_all_and_leaves_nothing(tmp_path):
    trainers = two_loaded_ranks(tmp_path)
    trainers[1][1][0].save_fault = OSError("no space left on rank 1")
    zero, one = on_both(trainers, "write_checkpoint", checkpoint(0))
    assert isinstance(one, OSError)
    assert isinstance(zero, Failed) and "on rank 1: OSError: no space left on rank 1" in zero.detail
    assert list((tmp_path / "runs/a/checkpoints").iterdir()) == []


def apart(tmp_path):
    """Two ranks of nodes that do not share their run folders."""
    shared = Together(2)
    return [make_trainer(tmp_path / f"node-{rank}", ThreadRanks(shared, rank)) for rank in range(2)]


def test_where_rank_0_cannot_export_no_other_rank_continues_to_save_its_state(
    tmp_path, monkeypatch
):
    trainers = two_loaded_ranks(tmp_path)
    (_, lead), (_, other) = trainers
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(lead[0], "save_checkpoint", full)
    reached = Mock()
    monkeypatch.setattr(other[0], "save_state", reached)
    zero, one = on_both(trainers, "write_checkpoint", checkpoint(0))
    assert isinstance(zero, Failed) and zero.code == "disk_full"
    assert isinstance(one, Failed) and "No space left on device" in one.detail
    assert not reached.called
    assert list((tmp_path / "runs/a/checkpoints").iterdir()) == []


def test_a_node_without_the_shared_run_folder_is_told_before_anything_is_written(
    tmp_path, monkeypatch
):
    trainers = two_loaded_ranks(tmp_path)
    monkeypatch.setattr(
        checkpoints,
        "check_seen",
        lambda path, rank: seen(path / "elsewhere" if rank else path, rank),
    )
    for outcome in on_both(trainers, "write_checkpoint", checkpoint(0)):
        assert isinstance(outcome, Failed)
        assert (
            "rank 1 does not see" in outcome.detail
            and "a folder that all nodes share" in outcome.detail
        )
    assert list((tmp_path / "runs/a/checkpoints").iterdir()) == []


def test_a_checkpoint_that_one_node_does_not_see_is_not_called_damaged(tmp_path):
    trainers = two_ranks(tmp_path / "node-0")
    on_both(trainers, "load_job", job_request())
    on_both(trainers, "write_checkpoint", checkpoint(0))
    for outcome in on_both(apart(tmp_path), "load_job", job_request()):
        assert isinstance(outcome, Failed) and "rank 1 does not see" in outcome.detail
    assert in_steps(tmp_path / "node-0") == [0]


def test_damage_that_only_another_rank_reads_is_found_by_all(tmp_path):
    trainers = two_loaded_ranks(tmp_path)
    on_both(trainers, "write_checkpoint", checkpoint(0))
    (tmp_path / "runs/a/checkpoints/step-000000/trainer/rank-1").write_text("9")
    states = on_both(two_ranks(tmp_path), "load_job", job_request())
    assert [state.resumed_step for state in states] == [None, None]
    assert all("trainer/rank-1 has other bytes" in state.damaged[0] for state in states)


def test_a_job_continues_with_other_ranks_memory_steps_and_logs(tmp_path):
    trained(tmp_path, 1)
    request = job_request()
    other = request.job.model_copy(
        update={
            "steps": 9,
            "memory": MemorySpec(micro_batch_tokens=64, zero_stage=3),
            "evaluation": EvaluationSpec(every=3),
            "checkpoints": CheckpointSpec(every=3),
            "wandb": WandbSpec(project="p"),
            "weight_sync": "disk",
        }
    )
    states = on_both(two_ranks(tmp_path), "load_job", request.model_copy(update={"job": other}))
    assert [(state.step, state.resumed_step) for state in states] == [(1, 1)] * 2


def test_the_loaded_job_with_other_memory_is_loaded_again_from_its_checkpoint(tmp_path):
    trainer, engines = trained(tmp_path, 1)
    request = job_request()
    longer = request.model_copy(update={"job": request.job.model_copy(update={"steps": 9})})
    trainer.load_job(longer)
    assert len(engines) == 1, "another number of steps needs no other engine"
    memory = MemorySpec(micro_batch_tokens=64)
    smaller = request.model_copy(update={"job": request.job.model_copy(update={"memory": memory})})
    assert trainer.load_job(smaller).step == 1
    assert [engine.job.memory.micro_batch_tokens for engine in engines] == [16384, 64]
    assert engines[0].closed and engines.remembered == smaller


def test_what_fits_into_memory_is_remembered_for_the_ranks_that_come_after(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    engines[0].fault = OutOfMemory("2 GiB short", PassBudget(4096))
    with pytest.raises(OutOfMemory):
        trainer.train_step(step_request(1))
    trainer.load_job(job_request())
    memory = engines[1].job.memory
    assert (memory.micro_batch_tokens, memory.gradient_checkpointing) == (4096, "auto")
    engines[1].fault = OutOfMemory("2 GiB short", PassBudget(4096, recomputes=True))
    with pytest.raises(OutOfMemory):
        trainer.train_step(step_request(1))
    trainer.load_job(job_request())
    memory = engines[2].job.memory
    assert (memory.micro_batch_tokens, memory.gradient_checkpointing) == (4096, True)


def test_only_rank_0_publishes_with_every_rank_taking_part(tmp_path):
    trainers = two_loaded_ranks(tmp_path)
    ref, nothing = on_both(
        trainers, "publish_weights", PublishRequest(job_id="a", version=0, method="shm")
    )
    assert (Path(ref.path) / "model.safetensors").read_bytes() == safetensors(w=b"weights 0")
    assert nothing is None
    again, nothing = on_both(
        trainers, "publish_weights", PublishRequest(job_id="a", version=0, method="shm")
    )
    assert (again, nothing) == (ref, None), "published already: rank 1 waits for no folder"


def write_checkpoints(folder: Path, written: Connection) -> None:
    """Sends each step whose checkpoint is written, until it is killed."""
    trainer, _ = make_trainer(folder)
    step = trainer.load_job(job_request(checkpoints={"keep_last": 2})).step
    while True:
        step += 1
        trainer.train_step(step_request(step))
        trainer.write_checkpoint(checkpoint(step))
        written.send(step)


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path):
    for life in range(4):
        written, theirs = warm().Pipe(duplex=False)
        writer = warm().Process(target=write_checkpoints, args=(tmp_path, theirs), daemon=True)
        writer.start()
        theirs.close()
        newest = written.recv()
        time.sleep(0.02 * (life + 1))
        writer.kill()
        writer.join()
        with contextlib.suppress(OSError, EOFError):  # of the last message there may be a part
            while True:
                newest = written.recv()
        steps = in_steps(tmp_path)
        assert steps[-1] >= newest and len(steps) >= min(2, newest)
        for step in steps:
            path = checkpoints.path_of(tmp_path / "runs/a/checkpoints", step)
            checkpoints.check_files(path, checkpoints.read_manifest(path), slice(None))
