"""What becomes of a job, for every class of error and every code that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.orchestrator.errors import CheckFailed, OperatorActionNeeded, Preempted, SyncFailed
from services.orchestrator.jobs.decisions import (
    IN_THE_JOB,
    LIMITS,
    MAX_LOSSES,
    MAX_RECOVERIES,
    RULES,
    Action,
    Decision,
    decide,
)
from services.orchestrator.store.connection import StoreUnavailable
from services.orchestrator.store.folder import BatchExists
from services.orchestrator.store.leases import LeaseLost
from services.orchestrator.store.records import UnreadableRecord
from shared.errors import (
    CODES,
    KINDS,
    BadRequest,
    Busy,
    Conflict,
    Failed,
    Forbidden,
    Gone,
    Malformed,
    NotFound,
    StateLost,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from shared.job import RESUMED_WITH
from shared.job.file import changed
from tests.support.scored_batches import make_job

STOP, RECOVER, PAUSE = Action.STOP, Action.RECOVER, Action.PAUSE
GIVE_BACK, WAIT, RELOAD = Action.GIVE_BACK, Action.WAIT, Action.RELOAD

EXPECTED: dict[tuple[type[Exception], str], Action] = {
    (BadRequest, "bad_request"): PAUSE,
    (BadRequest, "not_there"): WAIT,
    (BadRequest, "foreign"): PAUSE,
    (BadRequest, "too_stale"): PAUSE,
    (NotFound, "foreign"): WAIT,
    (Malformed, "malformed"): PAUSE,
    (Unauthorized, "unauthorized"): PAUSE,
    (Forbidden, "forbidden"): PAUSE,
    (NotFound, "not_found"): PAUSE,
    (NotFound, "no_operation"): PAUSE,
    (Gone, "gone"): PAUSE,
    (BadRequest, "context_length_exceeded"): PAUSE,
    (TooLarge, "too_large"): PAUSE,
    (Conflict, "conflict"): PAUSE,
    (Conflict, "body_differs"): PAUSE,
    (Conflict, "stale"): GIVE_BACK,
    (Conflict, "emptied"): STOP,
    (Conflict, "taken"): WAIT,
    (Conflict, "out_of_order"): RECOVER,
    (Conflict, "no_adapters"): RECOVER,
    (Conflict, "episode_lost"): RECOVER,
    (StateLost, "state_lost"): RELOAD,
    (Unavailable, "unavailable"): WAIT,
    (Unavailable, "unreachable"): RELOAD,
    (Unavailable, "starting"): WAIT,
    (Unavailable, "draining"): WAIT,
    (Unavailable, "hub_away"): WAIT,
    (Unavailable, "deadline"): PAUSE,
    (Unavailable, "wrong_type"): WAIT,
    (Busy, "busy"): WAIT,
    (Failed, "failed"): RECOVER,
    (Failed, "bug"): RECOVER,
    (Failed, "digest_differs"): RECOVER,
    (Failed, "not_seen"): RECOVER,
    (Failed, "not_met"): RECOVER,
    (Failed, "not_loaded"): RECOVER,
    (Failed, "shared"): RECOVER,
    (Failed, "tensors_differ"): RECOVER,
    (Failed, "out_of_memory"): PAUSE,
    (Failed, "not_finite"): PAUSE,
    (Failed, "disk_full"): RECOVER,
    (Failed, "run_folder_gone"): PAUSE,
}


@pytest.mark.parametrize(("kind", "code"), EXPECTED)
def test_every_code_of_every_class_is_decided(kind: type[Exception], code: str) -> None:
    error = kind("the sentence", code=code)  # type: ignore[call-arg]
    assert decide(error).action is EXPECTED[kind, code]


def test_no_class_and_no_code_is_left_out() -> None:
    assert {code for _, code in EXPECTED} == set(CODES)
    assert {kind for kind, _ in EXPECTED} == set(KINDS)


def test_errors_of_the_orchestrator_itself_are_decided_too() -> None:
    assert decide(LeaseLost("job")).action is STOP
    assert decide(BatchExists("another batch")) == Decision(GIVE_BACK, "another batch")
    assert decide(StoreUnavailable("Redis is unreachable")).action is STOP
    assert decide(UnreadableRecord("schema 7")).action is RECOVER
    assert decide(OperatorActionNeeded("step 3: 80%")).action is PAUSE
    assert decide(SyncFailed("weight sync: ...")).action is RECOVER
    assert decide(ZeroDivisionError("1/0")).action is PAUSE


def test_a_check_at_the_start_of_an_attempt_has_rules_of_its_own() -> None:
    refused = BadRequest("max_staleness is 1")
    assert decide(CheckFailed("colocation", "settings", refused)) == Decision(
        PAUSE, "max_staleness is 1; fix the cause"
    )
    again = decide(CheckFailed("data", "data", NotFound("no such file")))
    assert again.action is RECOVER and again.why == (
        "its data were accepted when it was submitted, and are refused now: no such file"
    )
    slow = Unavailable("300 s are over", code="deadline")
    assert decide(CheckFailed("rewards", "services", slow)).action is WAIT
    assert decide(slow).action is PAUSE
    assert decide(CheckFailed("rewards", "services", Unauthorized("no token"))).action is PAUSE
    assert decide(CheckFailed("data", "data", Failed("the Hub"))).action is RECOVER


def test_recovering_ends_after_a_few_times_in_a_row_and_pauses_with_what_to_do() -> None:
    error = Failed("rank 0 died")
    assert [decide(error, count).action for count in range(5)] == [RECOVER] * 3 + [PAUSE] * 2
    assert decide(error, 2).why == "rank 0 died"
    assert decide(error, 3).why == (
        "rank 0 died; make sure that it works (`hone doctor` shows how the services are)"
    )
    assert LIMITS == {RECOVER: MAX_RECOVERIES, RELOAD: MAX_LOSSES}


def test_a_service_that_is_unreachable_is_waited_for_as_often_as_it_takes() -> None:
    assert decide(Unavailable("the service has no GPU"), 1000).action is WAIT
    assert decide(NotFound("a proxy knows no such route", code="foreign"), 1000).action is WAIT


def test_a_job_that_loses_its_services_again_and_again_pauses_in_the_end() -> None:
    lost = Unavailable("cannot reach the trainer service", code="unreachable")
    assert {decide(lost, count).action for count in range(20)} == {RELOAD}
    assert decide(lost, 20).action is PAUSE and "ends its services itself" in decide(lost, 20).why


def test_a_disk_that_refuses_is_tried_again() -> None:
    stale = decide(OSError(116, "Stale file handle", "/runs/a/metrics.jsonl"))
    assert stale.action is RECOVER and stale.why.startswith("the disk refuses: [Errno 116] Stale")


def test_a_pause_names_its_remedy() -> None:
    full = Failed("the disk is full", code="disk_full")
    assert decide(full, MAX_RECOVERIES).why.endswith("; free some space")
    assert decide(ZeroDivisionError("1/0")).why == (
        "a bug in Hone: ZeroDivisionError: 1/0; look at the trace in the orchestrator's log"
    )
    refused = decide(BadRequest("lora.target_modules is 'nope'"), job_id="sums-1")
    assert refused.why == (
        "lora.target_modules is 'nope'; correct the service and `hone resume sums-1`, or the job: "
        "`hone resume sums-1 --set KEY=VALUE` changes checkpoints, evaluation, memory, metadata, "
        "priority, request, rollouts, steps, stop, trackers, wandb, weight_sync; for any other key "
        "submit a corrected job, with the newest checkpoint as its model if there is one "
        "(`hone download sums-1 --list`)"
    )
    assert not refused.resumes, "it would be refused again"
    own_code = decide(OperatorActionNeeded("step 3: no reward"), job_id="sums-1")
    assert own_code.resumes and own_code.why == (
        "step 3: no reward; a mistake in the job itself, such as its reward code, is stored with "
        "it: for that submit a corrected job, with the newest checkpoint as its model if there is "
        "one (`hone download sums-1 --list`); otherwise fix the cause"
    )
    refused = decide(BadRequest("413 Request Entity Too Large", code="foreign")).why
    assert "a proxy, or another program" in refused
    assert decide(Preempted("preempted: another job waits")).why == "preempted: another job waits"
    assert all(rule.remedy for rule in RULES if rule.kind is not Preempted)


REMEDY = re.compile(r"hone resume [^`]*?--set ([a-z_.]+)=(?!VALUE)")
"""A command that resumes a job with another value, as a message or a page names it."""

SOURCES = [
    file
    for folder in ("services", "shared", "hone", "docs")
    for file in sorted((Path(__file__).parents[3] / folder).rglob("*"))
    if file.suffix in (".py", ".md", ".toml", ".js")
]


def test_every_remedy_that_sets_a_key_sets_one_that_resuming_takes() -> None:
    named = {key for file in SOURCES for key in REMEDY.findall(file.read_text(encoding="utf-8"))}
    assert {"steps", "stop.max_cost", "weight_sync", "memory.micro_batch_tokens"} <= named
    assert {key for key in named if key.partition(".")[0] not in RESUMED_WITH} == set()
    with pytest.raises(BadRequest, match="makes another job: submit it as a new one"):
        changed(make_job(), ["lora.target_modules=all"])
    assert changed(make_job(), ["memory.micro_batch_tokens=64"]).memory.micro_batch_tokens == 64


def test_a_remedy_that_resumes_names_the_command_once() -> None:
    for rule in RULES:
        says_it = "hone resume" in rule.remedy or "submit a" in rule.remedy
        assert rule.remedy == IN_THE_JOB or rule.resumes is not says_it, rule
