"""The teacher's log-probs: how an endpoint is asked for them, what is waited for and what is
missing, and what they add to advantages, by hand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from services.orchestrator.extensions import teacher as module
from services.orchestrator.extensions.teacher import Teacher
from services.orchestrator.grpo.advantages import batch_advantages
from services.orchestrator.grpo.examples import (
    teacher_metrics,
    teacher_terms,
    to_examples,
    with_teacher_of,
)
from services.orchestrator.grpo.groups import teaches, too_many_missing
from services.orchestrator.grpo.metrics import reward_metrics
from shared.errors import BadRequest, Unavailable
from shared.job import Job, TeacherSpec
from shared.settings import Settings
from shared.wire import Batch, Branch, Part, Prompt, Rollout, RolloutGroup, Score, ScoredGroup, Span

Answer = tuple[int, dict[str, Any]]
KEY = "sk-teacher-1234"


def logprob_of(id: int) -> float:
    """What the endpoint gives each token."""
    return -id / 8


def by_vllm(asked: dict[str, Any]) -> Answer:
    """As vLLM answers `prompt_logprobs`."""
    listed = [
        {str(id): {"logprob": logprob_of(id), "rank": 1, "decoded_token": chr(id)}}
        for id in asked["prompt"]
    ]
    return 200, {"choices": [{"prompt_logprobs": [None, *listed[1:]]}]}


def by_a_teacher_that_rules_it_out(asked: dict[str, Any]) -> Answer:
    """As vLLM writes a probability of 0."""
    listed = [{str(id): {"logprob": -9999.0}} for id in asked["prompt"][1:]]
    return 200, {"choices": [{"prompt_logprobs": [None, *listed]}]}


def by_echo(asked: dict[str, Any]) -> Answer:
    """As an endpoint answers that knows OpenAI's fields alone."""
    if not asked.get("echo"):
        return 200, {"choices": [{"logprobs": None}]}
    ids = [*asked["prompt"], 7]
    values = [None, *(logprob_of(id) for id in ids[1:])]
    found = {"token_logprobs": values, "tokens": [chr(id) for id in ids]}
    return 200, {"choices": [{"logprobs": found}]}


@dataclass
class Endpoint:
    """`answers` are taken one after the other, the last one for good."""

    port: int
    answers: list[Callable[[dict[str, Any]], Answer]]
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    keys: list[str | None] = field(default_factory=list[str | None])

    def teacher(self, **how: Any) -> Teacher:
        settings = Settings(
            teacher_url=f"http://127.0.0.1:{self.port}/v1",
            teacher_api_key=KEY,  # type: ignore[arg-type]
        )
        return Teacher(TeacherSpec(model="big"), settings, **how)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions"
            found.asked.append(asked)
            found.keys.append(self.headers["Authorization"])
            answer = found.answers[0] if len(found.answers) == 1 else found.answers.pop(0)
            status, document = answer(asked)
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found = Endpoint(server.server_port, [by_vllm])
    yield found
    server.shutdown()
    server.server_close()


def rollout(*ids: int, **changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "text": "x",
        "token_ids": ids,
        "logprobs": (-0.5,) * len(ids),
        "finish_reason": "stop",
        "spans": (Span(version=0, start=0),),
    }
    return Rollout(**(fields | changes))


def group_of(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(prompt_token_ids=(9, 9), rollouts=rollouts)


def scored(teacher: Teacher, group: RolloutGroup, *values: float, alone: bool = False) -> Any:
    scores = [Score(value=value, parts={"right": Part(value=value)}) for value in values]

    async def ask() -> Any:
        try:
            return await teacher.score(group, scores, alone=alone)
        finally:
            await teacher.close()

    return asyncio.run(ask())


def status(number: int, says: str = "") -> Callable[[dict[str, Any]], Answer]:
    return lambda _: (number, {"message": says})


@pytest.mark.parametrize("answer", [by_vllm, by_echo])
def test_each_sampled_token_gets_the_teachers_log_prob(endpoint: Endpoint, answer: Any) -> None:
    endpoint.answers = [answer]
    turns = rollout(2, 4, 1, sampled=(1, 0, 1))
    one, two = scored(endpoint.teacher(), group_of(rollout(4, 8), turns), 1.0, 0.0)
    assert one.teacher_logprobs == [-0.5, -1.0] and two.teacher_logprobs == [-0.25, -0.125]
    # -0.5 - -0.5 and -0.5 - -1: 0 and 1/2, in the mean 1/4; -1/4 and -3/8
    assert (one.value, two.value) == (1.0, 0.0)
    assert [score.parts["teacher"].value for score in (one, two)] == [-0.25, 0.3125]
    prompts = {tuple(asked["prompt"]) for asked in endpoint.asked}
    assert prompts == {(9, 9, 4, 8), (9, 9, 2, 4, 1)}
    assert endpoint.asked[0]["model"] == "big" and set(endpoint.keys) == {f"Bearer {KEY}"}


def test_alone_the_teacher_is_the_reward_and_each_branch_is_a_row(endpoint: Endpoint) -> None:
    branch = Branch(
        prompt_token_ids=(5,), token_ids=(8,), logprobs=(-1.0,), spans=(Span(version=0, start=0),)
    )
    group = group_of(rollout(4, branches=(branch,)), rollout(2))
    scores = scored(endpoint.teacher(), group, 0.0, 0.0, alone=True)
    assert scores[0].teacher_logprobs == [-1.0, -0.5] and scores[0].value == 0.0
    assert scores[1].value == 0.25
    assert [5, 8] in [asked["prompt"] for asked in endpoint.asked]


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([status(401, f"no key {KEY}")], 'answered 401: {"message": "no key ***"}'),
        ([status(400, "too long")], 'answered 400: {"message": "too long"}'),
        ([status(500, "oom")], 'answered 500: {"message": "oom"}, 3 times'),
        ([lambda _: (200, {"choices": []})], "gave no log-probs of the 4 tokens"),
        (
            [lambda asked: (200, {"choices": [{"prompt_logprobs": [None, {}, {}, {}]}]})],
            "gave no log-probs of the 4 tokens",
        ),
        (
            [by_a_teacher_that_rules_it_out],
            "gives token 4, number 0 of the completion, the log-prob -9999.0; expected a finite",
        ),
    ],
)
def test_without_the_teachers_log_probs_a_reward_is_missing_and_says_why(
    endpoint: Endpoint, answers: Any, why: str
) -> None:
    endpoint.answers = answers
    (score,) = scored(endpoint.teacher(), group_of(rollout(4, 8)), 1.0)
    assert score.value is None and not score.teacher_logprobs
    assert why in score.parts["teacher"].detail and KEY not in score.parts["teacher"].detail
    assert score.parts["right"].value == 1.0
    batch = batch_of(group_of(rollout(4, 8)), [score])
    assert f"teacher: {score.parts['teacher'].detail}" in str(too_many_missing(batch))


def test_a_completion_whose_log_probs_are_not_known_is_missing(endpoint: Endpoint) -> None:
    (score,) = scored(endpoint.teacher(), group_of(rollout(4, 8, logprobs=())), 1.0)
    assert score.value is None and not endpoint.asked
    assert "gave log-probs of 0 tokens of the completion" in score.parts["teacher"].detail


def test_a_teacher_that_is_unreachable_is_waited_for_and_the_job_hears_of_it(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.http.connecting.AWAY_S", 0.0)
    told: list[str] = []

    async def tell(message: str, _away: bool) -> None:
        told.append(message)

    endpoint.answers = [status(503), status(429), status(502), status(500), by_vllm]
    (score,) = scored(endpoint.teacher(tell=tell), group_of(rollout(4)), 1.0)
    assert score.teacher_logprobs == [-0.5] and len(endpoint.asked) == 5
    assert "the teacher service is unreachable" in told[0] and "answered 503" in told[0]
    assert told[-1].startswith("the teacher service is back")
    endpoint.answers = [status(503)]
    (score,) = scored(endpoint.teacher(wait_s=0.05), group_of(rollout(4)), 1.0)
    assert "retried for 0.05 s" in score.parts["teacher"].detail


def test_what_the_teacher_gave_before_is_not_asked_for_again(endpoint: Endpoint) -> None:
    group, teacher = group_of(rollout(4), rollout(2, finish_reason="error")), endpoint.teacher()
    missing = Score(value=None, parts={"right": Part(value=None, verdict="error")})
    known = missing.model_copy(update={"teacher_logprobs": (-0.75,)})
    again = [Score(value=1.0, parts={}), Score(value=None, parts={})]
    kept = with_teacher_of([known, missing], again)

    async def ask() -> Any:
        found = await teacher.score(group, kept, alone=False)
        await teacher.close()
        return found

    one, two = asyncio.run(ask())
    assert one.value == 1.0 and one.parts["teacher"].value == -0.25 and not endpoint.asked
    assert two == again[1]


# --- what it adds --------------------------------------------------------------------------------


def job_of(*rewards: dict[str, Any], weight: float = 0.5, **changes: Any) -> Job:
    document: dict[str, Any] = {
        "name": "t",
        "model": "m/m",
        "steps": 1,
        "data": {"train": "x"},
        "advantages": {"std": "none"},
        "teacher": {"model": "big", "weight": weight},
        **({"rewards": rewards} if rewards else {}),
    }
    return Job.model_validate({**document, **changes})


def batch_of(group: RolloutGroup, scores: list[Score]) -> Batch:
    prompts = (Prompt(index=0, content="p", row={}),)
    return Batch(step=1, version=0, prompts=prompts, groups=(group,), scores=(tuple(scores),))


def examples_of(batch: Batch, job: Job) -> Any:
    return to_examples(batch.groups, batch_advantages(batch, job), teacher_terms(batch, job))


GROUP = group_of(rollout(4, 8), rollout(2, 4, 1, sampled=(1, 0, 1)), rollout(1))
GIVEN = [(-0.5, -1.0), (-0.25, -0.125), ()]


def test_the_teacher_adds_its_log_ratio_to_each_sampled_tokens_advantage() -> None:
    job = job_of({"grader": "right"})
    scores = [
        Score(value=value, parts={"right": Part(value=value)}, teacher_logprobs=given)
        for value, given in zip((1.0, 0.0, 0.5), GIVEN, strict=True)
    ]
    batch = batch_of(GROUP, scores)
    one, two = examples_of(batch, job)  # the third has no log-probs of the teacher
    assert one.advantages == [0.5, 0.5 - 0.5 * 0.5]
    assert two.advantages == [-0.5 + 0.5 * 0.25, -0.5, -0.5 + 0.5 * 0.375]
    metrics = teacher_metrics(batch, bound=10.0)
    assert metrics == {
        "teacher/clipped": 0.0,
        "teacher/kl": pytest.approx((0 + 0.5 - 0.25 - 0.375) / 4),
        "teacher/missing": pytest.approx(1 / 3),
    }


def test_a_log_ratio_beyond_the_bound_counts_as_the_bound() -> None:
    """The log-ratios are 24.5, 0, 2 and 2.5 nats of the first, and -1.5 and -4 of the second."""
    job = job_of(weight=0.5, teacher={"model": "big", "weight": 0.5, "max_log_ratio": 2.0})
    group = group_of(rollout(4, 8, 1, 1), rollout(2, 4, logprobs=(-2.0, -4.5)))
    given = [(-25.0, -0.5, -2.5, -3.0), (-0.5, -0.5)]
    scores = [Score(value=0.0, parts={}, teacher_logprobs=each) for each in given]
    batch = batch_of(group, scores)
    one, two = examples_of(batch, job)
    assert one.advantages == [-1.0, 0.0, -1.0, -1.0] and two.advantages == [0.75, 1.0]
    assert job_of().teacher and job_of().teacher.max_log_ratio == 10.0
    assert teacher_metrics(batch, 2.0) == {
        "teacher/clipped": 0.5,
        "teacher/kl": pytest.approx((24.5 + 0 + 2 + 2.5 - 1.5 - 4) / 6),
        "teacher/missing": 0.0,
    }


def test_a_group_whose_rewards_are_equal_is_taught_by_the_teacher() -> None:
    job = job_of({"grader": "right"}, weight=1.0)
    scores = [
        Score(value=1.0, parts={"right": Part(value=1.0)}, teacher_logprobs=given)
        for given in GIVEN
    ]
    batch = batch_of(GROUP, scores)
    assert examples_of(batch, job)[0].advantages == [0.0, -0.5]
    assert teaches(ScoredGroup(prompt=batch.prompts[0], group=GROUP, scores=batch.scores[0]), job)
    plain = job.model_copy(update={"teacher": None})
    assert not teaches(
        ScoredGroup(prompt=batch.prompts[0], group=GROUP, scores=batch.scores[0]), plain
    )


def test_alone_no_rewards_are_compared() -> None:
    job = job_of(weight=1.0)
    assert job.rewards == ()
    scores = [
        Score(value=value, parts={"teacher": Part(value=value)}, teacher_logprobs=given)
        for value, given in zip((-0.25, 0.3125, None), GIVEN, strict=True)
    ]
    one, two = examples_of(batch_of(GROUP, scores), job)
    assert one.advantages == [0.0, -0.5] and two.advantages == [0.25, 0.0, 0.375]
    assert reward_metrics((scores,), job)["frac_reward_zero_std"] == 0
    assert reward_metrics((scores[:1] * 2,), job)["frac_reward_zero_std"] == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rewards": [], "teacher": None}, "'rewards': got []; expected at least 1"),
        (
            {"data": {"train": "x", "eval": "y"}},
            "rewards is empty, and there are held-out",
        ),
        ({"training": {"loss": "gspo"}}, "the job has a teacher, 'big', so tokens of one sequence"),
        ({"training": {"importance": "sequence"}}, "whose ratio is of the sequence"),
        ({"rewards": [{"grader": "length", "name": "teacher"}]}, "two rewards are called"),
        ({"teacher": {"model": "big", "weight": 0}}, "greater than 0"),
    ],
)
def test_what_a_teacher_cannot_do_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        job_of(**changes)
    assert sentence in str(caught.value)


# --- its vocabulary ------------------------------------------------------------------------------


def checked(teacher: Teacher, job: Job) -> None:
    async def check() -> None:
        try:
            await teacher.check(job)
        finally:
            await teacher.close()

    asyncio.run(check())


def test_a_teacher_with_another_vocabulary_is_refused(endpoint: Endpoint, tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({f"word{id}": id for id in range(300)}, "word0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    job = job_of(model=str(tmp_path))
    shifted = 0

    def by_tokenizer(asked: dict[str, Any]) -> Answer:
        listed = [
            {
                str(id): {
                    "logprob": -1.0,
                    "decoded_token": tokenizer.decode([id + shifted], skip_special_tokens=False),
                }
            }
            for id in asked["prompt"]
        ]
        return 200, {"choices": [{"prompt_logprobs": [None, *listed[1:]]}]}

    endpoint.answers = [by_tokenizer]
    checked(endpoint.teacher(), job)
    assert len(endpoint.asked[0]["prompt"]) > 100
    shifted = 1
    with pytest.raises(BadRequest, match=r"reads token .* expected a teacher with the same vocab"):
        checked(endpoint.teacher(), job)
    endpoint.answers = [status(400, "Token id 300 is out of vocabulary")]
    with pytest.raises(BadRequest, match=r"out of vocabulary.*expected is a teacher"):
        checked(endpoint.teacher(), job)
    endpoint.answers = [status(503)]
    with pytest.raises(Unavailable, match="does not answer"):
        checked(endpoint.teacher(), job)


def test_without_an_endpoint_a_job_with_a_teacher_is_refused() -> None:
    with pytest.raises(BadRequest, match="HONE_TEACHER_URL of the orchestrator is not set"):
        Teacher(TeacherSpec(model="big"), Settings())
    assert KEY in Settings(teacher_api_key=KEY).secrets()  # type: ignore[arg-type]
