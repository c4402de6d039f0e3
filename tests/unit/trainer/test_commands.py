"""One rank's outcome and all ranks' answer; what happens when they differ; that no one waits for
ever."""

import asyncio
import threading
import time
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from services.trainer.engine import OutOfMemory, PassBudget, Ranks, as_hone_error
from services.trainer.processes import commands
from services.trainer.processes.commands import (
    FirstLoad,
    Inbox,
    RanksRestartNeeded,
    follow,
    perform,
    watch,
)
from services.trainer.processes.rendezvous import Channel, Failures
from shared.errors import BadRequest, Conflict, Failed, HoneError, Unavailable
from shared.host.logs import of_request, request_id
from shared.wire import PublishRequest, StepResult, TrainerState, TrainStepRequest
from tests.support.trainer_fakes import (
    EXAMPLE,
    job_request,
    loaded_trainer,
    make_trainer,
    step_request,
)


class OtherRank(Ranks):
    """One other rank, whose outcome of the command is scripted: None is success."""

    def __init__(self, other: Failed | None, rank: int = 0) -> None:
        self.rank = rank
        self.other = other
        self.failures: list[HoneError] = []

    def settle(self, error, result=None):
        if error is not None:
            self.report_failure(error)
        return [
            (error.problem() if error else None, result),
            (self.other.problem() if self.other else None, None),
        ]

    def on_all_ranks(self, act):
        return [act()]

    def report_failure(self, error):
        self.failures.append(error)


def test_success_everywhere_is_rank_0s_result(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    outcome = perform(trainer, OtherRank(None), "load_job", job_request())
    assert outcome == trainer.state()


def test_a_job_that_one_rank_could_not_load_is_unloaded_on_all(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    outcome = perform(trainer, OtherRank(Failed("rank 1 has no memory")), "load_job", job_request())
    assert isinstance(outcome, Failed) and outcome.detail == "rank 1 has no memory"
    assert trainer.state().job_id is None
    assert engines.remembered is None


def test_ranks_of_which_one_has_not_applied_a_step_end_and_come_back(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    with pytest.raises(RanksRestartNeeded, match="rank 1 has no memory"):
        perform(trainer, OtherRank(Failed("rank 1 has no memory")), "train_step", step_request(1))
    assert engines.remembered == job_request()
    # The other ranks wait for rank 0 to end them, so that it can answer first.
    outcome = perform(
        trainer, OtherRank(Failed("rank 0 has no memory"), rank=1), "train_step", step_request(2)
    )
    assert isinstance(outcome, Failed)


def test_a_failure_of_one_rank_to_write_is_an_error_and_no_more(tmp_path):
    trainer, _ = loaded_trainer(tmp_path)
    body = PublishRequest(job_id="a", version=0, method="shm")
    outcome = perform(trainer, OtherRank(Failed("rank 1 has no disk")), "publish_weights", body)
    assert isinstance(outcome, Failed)
    assert trainer.state().job_id == "a"


def test_an_error_all_ranks_agree_on_leaves_the_job(tmp_path):
    trainer, _ = loaded_trainer(tmp_path)
    ranks = OtherRank(Failed("the same"))
    outcome = perform(trainer, ranks, "train_step", step_request(5))
    assert isinstance(outcome, Conflict) and outcome.detail == "got step 5, expected 1"
    assert trainer.state().job_id == "a"
    assert [failure.detail for failure in ranks.failures] == ["got step 5, expected 1"]


def test_running_out_of_memory_on_all_ranks_leaves_the_step_to_be_tried_again(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    engines[0].fault = Failed("out of memory; set memory.micro_batch_tokens to 8192")
    outcome = perform(trainer, OtherRank(Failed("the same")), "train_step", step_request(1))
    assert isinstance(outcome, Failed)
    again = perform(trainer, OtherRank(None), "train_step", step_request(1, examples=(EXAMPLE,)))
    assert isinstance(again, StepResult) and again.step == 1


def test_an_unforeseen_error_names_the_rank_and_the_command(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    engines[0].fault = MemoryError("17 bytes short")
    outcome = perform(trainer, Ranks(), "train_step", step_request(1))
    assert (
        isinstance(outcome, Failed)
        and outcome.detail == "train_step failed on rank 0: MemoryError: 17 bytes short"
    )


def test_a_rank_whose_device_failed_for_good_ends(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    engines[0].fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    engines.fault = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    with pytest.raises(
        RanksRestartNeeded, match="the device of rank 0 failed: AcceleratorError"
    ) as end:
        perform(trainer, Ranks(), "train_step", step_request(1))
    assert isinstance(end.value.error, Unavailable)
    assert engines.remembered == job_request(), "the ranks that come after load it again"


def test_a_rank_out_of_memory_is_unavailable_if_smaller_micro_batches_may_help():
    may = as_hone_error(OutOfMemory("2 GiB short", PassBudget(512)), "train_step", 1)
    cannot = as_hone_error(OutOfMemory("2 GiB short"), "train_step", 1)
    assert isinstance(may, Unavailable)
    assert isinstance(cannot, Failed) and cannot.code == "out_of_memory"


def test_a_note_is_seen_by_another_rank_until_it_is_cleared():
    store = HashStore()
    own, other = Failures(store, 3, 4), Failures(store, 0, 4)
    assert other.first() is None
    own.report(Failed("rank 3 has no memory", code="out_of_memory"))
    found = other.first()
    assert isinstance(found, Failed)
    assert (found.detail, found.code) == ("rank 3 has no memory", "out_of_memory")
    own.clear()
    assert other.first() is None


def test_a_rank_that_others_wait_for_in_vain_ends_the_wait_with_its_sentence(monkeypatch):
    monkeypatch.setattr(commands, "FAILURE_GRACE_S", 0.3)
    monkeypatch.setattr(commands, "FAILURE_POLL_S", 0.01)
    store, ended = HashStore(), list[HoneError]()
    watcher = threading.Thread(
        target=watch, args=(Failures(store, 0, 2), ended.append), daemon=True
    )
    watcher.start()
    failures = Failures(store, 1, 2)
    failures.report(Failed("rank 1 is about to meet the others"))
    time.sleep(0.1)
    failures.clear()
    time.sleep(0.1)
    assert watcher.is_alive(), "a failure that was cleared in time ends nothing"
    failures.report(Unavailable("rank 1 has no memory"))
    watcher.join(5)
    assert [str(error) for error in ended] == ["rank 1 has no memory"]
    assert isinstance(ended[0], Unavailable)


def test_a_job_loaded_before_a_failure_comes_first_and_makes_the_trainer_ready():
    inbox = Inbox()
    readiness = FirstLoad.after_loading(inbox, job_request())
    inbox.put("train_step", step_request(1))
    ticket = inbox.next(1)
    assert ticket is not None and ticket.name == "load_job"
    before = "job 'a', which was loaded before a failure,"
    assert readiness.problem(None) == f"{before} is being loaded again"
    ticket.answer.set_exception(Failed("its checkpoint is gone"))
    assert readiness.problem(None) == f"{before} could not be loaded again: its checkpoint is gone"
    assert readiness.problem("b") is None, "someone has loaded another since"
    readiness.ends = "rank 1 has no memory"
    assert readiness.problem("b") == "rank 1 has no memory"
    assert FirstLoad.after_loading(Inbox(), None).problem(None) is None


async def test_a_failed_inbox_answers_the_command_under_way():
    inbox = Inbox()
    call = asyncio.create_task(inbox.run("train_step", step_request(1)))
    await asyncio.sleep(0)
    assert inbox.next(1) is not None
    inbox.fail(Failed("rank 1 has no memory"))
    with pytest.raises(Failed, match="rank 1 has no memory"):
        await call


async def test_a_caller_that_disconnects_cancels_nothing(tmp_path):
    inbox = Inbox()
    call = asyncio.create_task(inbox.run("train_step", step_request(1)))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.sleep(0)
    ticket = inbox.next(1)
    assert ticket is not None and not ticket.answer.cancelled()


class EndOfTest(Exception):
    pass


async def test_commands_cross_the_channel_whole_and_idling_is_no_error(
    tmp_path, one_rank, monkeypatch
):
    monkeypatch.setattr(commands, "IDLE_S", 0.01)
    trainer, engines = make_trainer(tmp_path)
    inbox = Inbox()

    def main_thread() -> None:
        with pytest.raises(EndOfTest):
            follow(trainer, Channel.open(Failures(HashStore(), 0, 1)), inbox)

    thread = threading.Thread(target=main_thread)
    thread.start()
    await inbox.run("load_job", job_request())
    await asyncio.sleep(0.1)  # some empty commands
    seen: list[tuple[TrainStepRequest, str]] = []

    def note(body: TrainStepRequest) -> TrainerState:
        seen.append((body, request_id()))
        return trainer.state()

    monkeypatch.setattr(trainer, "train_step", note)
    with of_request("demo-1.abc"):
        await inbox.run("train_step", step_request(1))
    assert seen == [(step_request(1), "demo-1.abc")]
    with pytest.raises(Conflict, match="loaded with another body"):
        await inbox.run("load_job", job_request(learning_rate=0.5))
    assert len(engines) == 1
    # A body in JSON can hold what the ranks' message cannot: its caller is told, and no rank ends.
    with pytest.raises(BadRequest, match="TrainStepRequest holds a whole number beyond 64 bits"):
        await inbox.run("train_step", step_request(10**30))
    assert await inbox.run("train_step", step_request(1)) == trainer.state()
    monkeypatch.setattr(inbox, "next", Mock(side_effect=EndOfTest))
    await asyncio.to_thread(thread.join)
