"""One rank's outcome and all ranks' answer; what happens when they differ; that nobody waits for ever."""

import asyncio
import os
import threading
import time
from unittest.mock import Mock

import pytest
from trainer_fakes import job_request, make_trainer, step_request

from services.trainer import commands
from services.trainer.commands import Channel, Inbox, Notes, follow, perform, watch
from shared.errors import Conflict, Failed
from shared.wire import TrainStepRequest


class OtherRank:
    """A channel to one other rank, whose outcomes are scripted: None is success."""

    rank, num_ranks = 0, 2

    def __init__(self, other: Failed | None) -> None:
        self.other = other

    def gather(self, value):
        return [value, self.other.problem() if self.other else None]


def test_success_everywhere_is_rank_0s_result(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    outcome = perform(trainer, OtherRank(None), Notes(tmp_path, 0), "load_job", job_request())
    assert outcome == trainer.state()


def test_an_error_of_one_rank_is_the_error_of_all_and_the_job_is_unloaded(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    outcome = perform(trainer, OtherRank(Failed("rank 1 has no memory")), Notes(tmp_path, 0), "load_job", job_request())
    assert isinstance(outcome, Failed) and outcome.detail == "rank 1 has no memory"
    assert trainer.state().job_id is None


def test_an_error_all_ranks_agree_on_leaves_the_job(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    trainer.load_job(job_request())
    outcome = perform(trainer, OtherRank(Failed("the same")), Notes(tmp_path, 0), "train_step", step_request(5))
    assert isinstance(outcome, Conflict) and outcome.detail == "got step 5, expected 1"
    assert trainer.state().job_id == "a"
    assert list(tmp_path.glob("failed-*")) == []


def test_an_unforeseen_error_names_the_rank_and_the_command(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request())
    engines[0].fault = MemoryError("17 bytes short")
    outcome = perform(trainer, OtherRank(None), Notes(tmp_path, 0), "train_step", step_request(1))
    assert isinstance(outcome, Failed) and outcome.detail == "train_step failed on rank 0: MemoryError: 17 bytes short"


def test_a_note_is_found_once_it_is_old_enough_and_gone_when_cleared(tmp_path):
    notes = Notes(tmp_path, 3)
    assert notes.standing(0) is None
    notes.leave("rank 3 has no memory")
    assert notes.standing(60) is None
    os.utime(tmp_path / "failed-3", (time.time() - 61,) * 2)
    assert Notes(tmp_path, 0).standing(60) == "rank 3 has no memory"
    notes.clear()
    assert notes.standing(0) is None


def test_a_rank_that_others_wait_for_in_vain_ends_the_wait_with_its_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "NOTE_GRACE_S", 0.05)
    monkeypatch.setattr(commands, "NOTE_POLL_S", 0.01)
    ended: list[str] = []
    watcher = threading.Thread(target=watch, args=(Notes(tmp_path, 0), ended.append), daemon=True)
    watcher.start()
    Notes(tmp_path, 1).leave("rank 1 has no memory")
    watcher.join(5)
    assert ended == ["rank 1 has no memory"]


async def test_a_failed_inbox_answers_the_command_under_way():
    inbox = Inbox()
    call = asyncio.create_task(inbox.run("train_step", step_request(1)))
    await asyncio.sleep(0)
    assert inbox.next(1) is not None
    inbox.fail(Failed("rank 1 has no memory"))
    with pytest.raises(Failed, match="rank 1 has no memory"):
        await call


async def test_a_caller_that_goes_away_cancels_nothing(tmp_path):
    inbox = Inbox()
    call = asyncio.create_task(inbox.run("train_step", step_request(1)))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.sleep(0)
    ticket = inbox.next(1)
    assert ticket is not None and not ticket.answer.cancelled()


class EndOfTest(Exception):
    pass


async def test_commands_cross_the_channel_whole_and_idling_is_no_error(tmp_path, one_rank, monkeypatch):
    monkeypatch.setattr(commands, "HEARTBEAT_S", 0.01)
    trainer, engines = make_trainer(tmp_path)
    inbox = Inbox()

    def main_thread() -> None:
        with pytest.raises(EndOfTest):
            follow(trainer, Channel(), Notes(tmp_path, 0), inbox)

    thread = threading.Thread(target=main_thread)
    thread.start()
    await inbox.run("load_job", job_request())
    await asyncio.sleep(0.1)  # some heartbeats
    seen: list[TrainStepRequest] = []
    monkeypatch.setattr(trainer, "train_step", lambda body: seen.append(body) or trainer.state())
    await inbox.run("train_step", step_request(1))
    assert seen == [step_request(1)]
    with pytest.raises(Conflict, match="loaded with another body"):
        await inbox.run("load_job", job_request(learning_rate=0.5))
    assert len(engines) == 1
    monkeypatch.setattr(inbox, "next", Mock(side_effect=EndOfTest))
    await asyncio.to_thread(thread.join)
