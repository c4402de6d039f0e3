"""Who is loaded on a trainer that jobs share, whose turn it is, and what a fault costs each."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.trainer.trainer import Trainer
from shared.errors import BadRequest, Conflict, StateLost
from shared.job import LoraSpec
from shared.weights.folders import MANIFEST, STATE
from shared.wire import CheckpointRequest, PublishRequest, TrainerJob
from tests.support.trainer_fakes import (
    Engines,
    ThreadRanks,
    Together,
    job_request,
    make_trainer,
    on_all,
    step_request,
)


def shared(
    job_id: str, attempt: int, beside: tuple[int, ...] = (), *, rank: int = 4, epoch: int = 1
) -> TrainerJob:
    request = job_request(job_id)
    job = request.job.model_copy(update={"lora": LoraSpec(rank=rank), "name": job_id})
    return TrainerJob(job_id=job_id, job=job, attempt=attempt, epoch=epoch, beside=beside)


ATTEMPTS = {"a": 5, "b": 7, "c": 9}


def do(trainer: Trainer, job_id: str, step: int) -> Any:
    request = step_request(step, job_id=job_id)
    fence = {"attempt": ATTEMPTS[job_id], "epoch": 1}
    return trainer.train_step(request.model_copy(update=fence))


def publish(trainer: Trainer, job_id: str, version: int) -> Any:
    return trainer.publish_weights(
        PublishRequest(
            job_id=job_id, version=version, method="lora", attempt=ATTEMPTS[job_id], epoch=1
        )
    )


@pytest.fixture
def both(tmp_path: Path) -> tuple[Trainer, Engines]:
    """A trainer that `a` and `b` share; `b` came last."""
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(shared("a", 5))
    do(trainer, "a", 1)
    trainer.load_job(shared("b", 7, (5,)))
    return trainer, engines


def test_two_jobs_take_turns_on_one_engine(both: tuple[Trainer, Engines]) -> None:
    trainer, engines = both
    assert trainer.state().sharing == ("b", "a")
    assert (trainer.state().job_id, trainer.state().step) == ("b", 0)
    do(trainer, "b", 1)
    do(trainer, "a", 2)
    do(trainer, "a", 3)
    do(trainer, "b", 2)
    (engine,) = engines
    assert engine.turns == ["b", "a", "b"], "and none where a job continues"
    assert (trainer.state().step, engine.num_updates) == (2, 2)
    first, second = publish(trainer, "a", 3), publish(trainer, "b", 2)
    assert first.adapter != second.adapter
    assert Path(first.path, "adapter_model.safetensors").read_bytes().endswith(b"adapter 3")
    assert Path(second.path, "adapter_model.safetensors").read_bytes().endswith(b"adapter 2")


def test_a_turn_is_no_part_of_a_repeated_operation(both: tuple[Trainer, Engines]) -> None:
    trainer, (engine,) = both
    first = do(trainer, "b", 1)
    do(trainer, "a", 2)
    assert do(trainer, "b", 1) == first
    assert engine.num_updates == 1


def test_an_older_attempt_that_no_one_named_is_superseded(both: tuple[Trainer, Engines]) -> None:
    trainer, _ = both
    for job_id, attempt in (("a", 4), ("z", 6)):
        with pytest.raises(Conflict) as raised:
            trainer.load_job(shared(job_id, attempt))
        assert raised.value.code == "stale"
    again = trainer.load_job(shared("a", 5, epoch=2))
    assert (again.job_id, again.step) == ("a", 1), "the trainer has its state"


def test_a_job_that_names_one_ends_the_other(both: tuple[Trainer, Engines]) -> None:
    trainer, engines = both
    trainer.load_job(shared("c", 9, (7,)))
    assert trainer.state().sharing == ("c", "b")
    with pytest.raises(Conflict, match="superseded"):
        do(trainer, "a", 2)
    do(trainer, "b", 1)
    assert len(engines) == 1


@pytest.mark.parametrize("rank", [4, 8], ids=["alone", "another shape"])
def test_a_job_that_shares_with_none_has_a_new_engine(
    both: tuple[Trainer, Engines], rank: int
) -> None:
    trainer, engines = both
    trainer.load_job(shared("c", 9, () if rank == 4 else (5, 7), rank=rank))
    assert [engine.closed for engine in engines] == [True, False]
    assert trainer.state().sharing == ("c",)


def test_a_fault_of_one_job_costs_the_other_nothing(both: tuple[Trainer, Engines]) -> None:
    trainer, engines = both
    do(trainer, "b", 1)
    do(trainer, "a", 2)
    engines[0].fault = RuntimeError("the bucket is half full")
    with pytest.raises(RuntimeError):
        do(trainer, "a", 3)
    assert trainer.state().sharing == ("b",)
    do(trainer, "b", 2)
    assert (len(engines), engines[1].num_updates) == (2, 2), "from where it was, on a new engine"
    with pytest.raises(StateLost, match="got job 'a', expected 'b', the one loaded"):
        do(trainer, "a", 3)
    assert trainer.load_job(shared("a", 5, epoch=2)).step == 0, "from its newest checkpoint"


def test_a_turn_that_fails_halfway_loses_that_job_alone(both: tuple[Trainer, Engines]) -> None:
    trainer, engines = both
    do(trainer, "b", 1)

    engines[0].turn_fault = RuntimeError("no memory")
    with pytest.raises(RuntimeError):
        do(trainer, "a", 2)
    assert engines[0].closed
    with pytest.raises(
        StateLost
    ):  # and its newest checkpoint is loaded, in place of the same again
        do(trainer, "a", 2)
    do(trainer, "b", 2)
    assert [engine.num_updates for engine in engines[1:]] == [2]


def test_an_older_attempt_of_the_job_itself_is_obeyed_no_more(
    both: tuple[Trainer, Engines],
) -> None:
    """Its lease has not expired everywhere, so the newer attempt may have named it."""
    trainer, _ = both
    trainer.load_job(shared("a", 9, (5, 7)))
    with pytest.raises(Conflict) as raised:
        do(trainer, "a", 2)
    assert raised.value.code == "stale"


@pytest.mark.parametrize(
    ("fault", "sharing"),
    [("turn_fault", ("b",)), ("aside_fault", ())],
    ids=["the next cannot begin", "the one before cannot be set aside"],
)
def test_a_turn_that_fails_on_one_rank_fails_on_all(
    tmp_path: Path, fault: str, sharing: tuple[str, ...]
) -> None:
    group = Together(2)
    made = [make_trainer(tmp_path / str(rank), ThreadRanks(group, rank)) for rank in range(2)]
    trainers = [trainer for trainer, _ in made]
    for request in (shared("a", 5), shared("b", 7, (5,))):
        on_all(*(partial(trainer.load_job, request) for trainer in trainers))
    setattr(made[1][1][0], fault, RuntimeError("no memory"))
    errors = on_all(*(partial(do, trainer, "a", 1) for trainer in trainers))
    assert ["no memory" in str(error) for error in errors] == [True, True]
    assert [trainer.state().sharing for trainer in trainers] == [sharing] * 2
    if "b" in sharing:
        again = on_all(*(partial(do, trainer, "b", 1) for trainer in trainers))
        assert not any(isinstance(one, Exception) for one in again)


def test_the_newest_attempt_is_remembered_for_restarted_ranks(
    both: tuple[Trainer, Engines], tmp_path: Path
) -> None:
    trainer, engines = both
    trainer.load_job(shared("a", 5, epoch=2))
    assert engines.remembered and engines.remembered.job_id == "b"
    next_life, _ = make_trainer(tmp_path)
    next_life.load_job(engines.remembered)
    with pytest.raises(Conflict, match="superseded"):
        next_life.load_job(shared("z", 6))
    assert next_life.load_job(shared("a", 5, epoch=3)).step == 0


def test_each_job_has_checkpoints_of_its_own(both: tuple[Trainer, Engines]) -> None:
    trainer, _ = both
    do(trainer, "b", 1)
    for job_id in ("a", "b"):
        found = trainer.write_checkpoint(
            CheckpointRequest(job_id=job_id, step=1, attempt=ATTEMPTS[job_id], epoch=1)
        )
        assert found and f"/{job_id}/" in found.path


def test_a_job_begins_with_a_checkpoint_once_and_then_continues_from_its_own(
    tmp_path: Path,
) -> None:
    other, _ = make_trainer(tmp_path)
    other.load_job(job_request("other"))
    written = other.write_checkpoint(CheckpointRequest(job_id="other", step=0))
    assert written
    start = Path(written.path)
    trainer, engines = make_trainer(tmp_path)
    request = job_request("a", start_from=str(start), start_optimizer=True)
    trainer.load_job(request)
    assert engines[0].loads == [(start / STATE, True)]
    trainer.write_checkpoint(CheckpointRequest(job_id="a", step=0))
    next_life, engines = make_trainer(tmp_path)
    next_life.load_job(request)
    own = tmp_path / "runs/a/checkpoints/step-000000" / STATE
    assert engines[0].loads == [(own, True)]

    manifest = json.loads((start / MANIFEST).read_text()) | {"model": "0123456789abcdef"}
    (start / MANIFEST).write_text(json.dumps(manifest))
    third, engines = make_trainer(tmp_path)
    with pytest.raises(BadRequest, match="began with another model: it had the fingerprint '01"):
        third.load_job(job_request("b", start_from=str(start)))
    assert engines[0].loads == []
