"""Whose command is next on a trainer that several jobs share."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from services.trainer.processes import commands
from services.trainer.processes.commands import FairQueue, Ticket
from shared.wire import (
    Example,
    Fenced,
    ForwardBackwardRequest,
    Optimization,
    OptimStepRequest,
    PublishRequest,
    TokenIds,
    TokenLoss,
    TrainStepRequest,
)
from tests.support.trainer_fakes import job_request

LOSS = TokenLoss(name="cross_entropy")
HOW = Optimization(learning_rate=0.1)


def of_tokens(num_tokens: int) -> Example:
    ids = TokenIds([3] * (num_tokens - 2))
    return Example(prompt_token_ids=TokenIds([1, 2]), token_ids=ids, advantage=1.0)


def ticket(body: Fenced) -> Ticket:
    return Ticket("any", body, Future(), "id")


def step(job_id: str, num_tokens: int, number: int = 1) -> Ticket:
    return ticket(TrainStepRequest(job_id=job_id, step=number, examples=(of_tokens(num_tokens),)))


def call(job_id: str, num_tokens: int) -> Ticket:
    examples = (of_tokens(num_tokens),)
    return ticket(ForwardBackwardRequest(job_id=job_id, step=1, examples=examples, loss=LOSS))


def next_of(queue: FairQueue) -> Ticket:
    found = queue.next(0.0)
    assert found is not None
    return found


def order(queue: FairQueue) -> str:
    found = ""
    while one := queue.next(0.0):
        found += one.job_id
    return found


def test_jobs_get_equal_tokens_whatever_the_size_of_their_steps() -> None:
    """`a` begins at 0, 10, 20, ...; `b` at 0 and 30: equal tokens, and the first to come at a
    tie."""
    queue = FairQueue()
    for number in range(1, 7):
        queue.put(step("a", 10, number))
    for number in range(1, 3):
        queue.put(step("b", 30, number))
    assert order(queue) == "abaaabaa"


def test_a_weight_is_a_share_of_the_tokens() -> None:
    queue = FairQueue()
    for job_id, weight in (("a", 1.0), ("b", 3.0)):
        queue.put(ticket(job_request(job_id).model_copy(update={"weight": weight})))
    for number in range(1, 9):
        queue.put(step("a", 30, number))
        queue.put(step("b", 30, number))
    found = order(queue)[2:]
    assert found[:8] == "abbbabbb"


def test_the_jobs_of_one_key_have_one_share() -> None:
    queue = FairQueue()
    for job_id, key in (("a", "alice"), ("b", "alice"), ("c", "bob")):
        queue.put(ticket(job_request(job_id).model_copy(update={"key": key})))
    assert len(order(queue)) == 3
    for number in range(1, 5):
        for job_id in "abc":
            queue.put(step(job_id, 30, number))
    assert order(queue) == "acbcacbcabab", "bob's one job has as much as alice's two"


def test_a_job_that_was_idle_gets_no_credit_and_a_flood_hurts_itself_alone() -> None:
    queue = FairQueue()
    for number in range(1, 101):
        queue.put(step("flood", 10, number))
    assert all(queue.next(0.0) for _ in range(50))
    queue.put(step("b", 10))
    queue.put(step("b", 10, 2))
    served = [one.job_id for one in (queue.next(0.0) for _ in range(4)) if one]
    assert served.count("b") == 2, "it is served at once, by turns"


def test_commands_without_tokens_are_done_in_order() -> None:
    queue = FairQueue()
    queue.put(step("a", 10))
    queue.put(ticket(PublishRequest(job_id="a", version=1, method="lora")))
    queue.put(step("b", 10))
    queue.put(step("a", 10, 2))
    found = [queue.next(0.0) for _ in range(4)]
    own = [type(one.body).__name__ for one in found if one and one.job_id == "a"]
    assert own == ["TrainStepRequest", "PublishRequest", "TrainStepRequest"]


def test_a_flood_of_commands_without_tokens_hurts_itself_alone() -> None:
    """Two jobs of a key only publish, and another job computes log-probs: each waits for the
    answer before its next command."""
    queue, served = FairQueue(), {"a": 0, "b": 0, "c": 0}

    def send(job_id: str) -> None:
        publish = PublishRequest(job_id=job_id, version=1, method="lora")
        queue.put(step("a", 1000) if job_id == "a" else ticket(publish))

    for job_id, key in (("a", "alice"), ("b", "bob"), ("c", "bob")):
        queue.put(ticket(job_request(job_id).model_copy(update={"key": key})))
    assert len(order(queue)) == 3
    for job_id in served:
        send(job_id)
    for _ in range(300):
        job_id = next_of(queue).job_id
        served[job_id] += 1
        send(job_id)
    assert served["a"] > 100, served


def test_a_job_whose_gradient_waits_keeps_its_turn() -> None:
    queue = FairQueue()
    queue.put(call("a", 1000))
    queue.put(call("b", 10))
    assert next_of(queue).job_id == "a"
    later = threading.Timer(0.03, lambda: queue.put(ticket(step_of("a"))))
    later.start()
    assert isinstance(next_of(queue).body, OptimStepRequest), "it was waited for"
    assert next_of(queue).job_id == "b"
    started = time.monotonic()
    queue.put(step("c", 10))
    assert next_of(queue).job_id == "c"
    assert time.monotonic() - started >= commands.HOLD_S, "b's program sends nothing"


def step_of(job_id: str) -> OptimStepRequest:
    return OptimStepRequest(job_id=job_id, step=2, optimization=HOW)


def test_a_gradient_of_many_calls_does_not_keep_the_trainer_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "TURN_TOKENS", 100)
    queue = FairQueue()
    for _ in range(20):
        queue.put(call("a", 30))
    queue.put(step("b", 10))
    found = order(queue)
    assert found.index("b") == 4, "a is at 120 tokens then, and b at 0"


@pytest.mark.parametrize(("num_calls", "num_tokens"), [(8, 5_000), (2, 100_000)])
def test_jobs_of_one_key_do_not_take_each_others_gradients(num_calls: int, num_tokens: int) -> None:
    """Eight programs of a key send calls and a step, again and again, and wait for each answer. A
    gradient is lost where another job's command comes in between."""
    queue, num_sent = FairQueue(), dict.fromkeys("abcdefgh", 0)

    def send(job_id: str) -> None:
        is_step = num_sent[job_id] % (num_calls + 1) == num_calls
        queue.put(ticket(step_of(job_id)) if is_step else call(job_id, num_tokens))
        num_sent[job_id] += 1

    def served() -> str:
        job_id = next_of(queue).job_id
        send(job_id)
        return job_id

    for job_id in num_sent:
        queue.put(ticket(job_request(job_id).model_copy(update={"key": "alice"})))
    assert len(order(queue)) == len(num_sent)
    for job_id in num_sent:
        send(job_id)
    turns = [[served() for _ in range(num_calls + 1)] for _ in range(40)]
    assert all(len(set(turn)) == 1 for turn in turns), turns
    assert {turn[0] for turn in turns[:8]} == set(num_sent), "and each has its turn"
