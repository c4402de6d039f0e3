"""How graders are called: once for what is alike, within limits, kept and closed; and what a
failure becomes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from services.reward.grading import calling, registry, scoring
from services.reward.grading.calling import key_of
from services.reward.grading.failures import GradingFailed
from services.reward.grading.registry import Grader, Params, grader
from services.reward.grading.scoring import Scorer
from shared.errors import BadRequest, Busy, Failed
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem, ScoreRequest
from tests.support.reward_helpers import scripted


class ProbeParams(Params):
    """What the probe does, and with what limits."""

    how: str = "ok"
    size: int | None = None
    at_once: int = 8
    deadline_s: float = 5.0
    pure: bool = True


@grader("test_probe")
class Probe(Grader[ProbeParams]):
    """Counts how it is called."""

    calls: ClassVar[list[list[str]]] = []
    running = 0
    most_running = 0
    closed: ClassVar[list[str | None]] = []

    def __init__(self, spec: RewardSpec, params: ProbeParams, tools: Any) -> None:
        super().__init__(spec, params, tools)
        self.pure, self.items_per_call = params.pure, params.size
        self.max_concurrency, self.deadline_s = params.at_once, params.deadline_s

    def content(self, item: ScoreItem) -> Any:
        return item.completion.strip()

    async def close(self) -> None:
        Probe.closed.append(self.tools.job_id)

    async def grade(self, items: Sequence[ScoreItem]) -> list[Part]:
        Probe.calls.append([item.completion for item in items])
        Probe.running += 1
        Probe.most_running = max(Probe.running, Probe.most_running)
        await asyncio.sleep(60 if self.params.how == "hang" else 0.01)
        Probe.running -= 1
        if self.params.how == "raise":
            raise KeyError("lost")
        if self.params.how == "fail":
            raise GradingFailed("the judge refused", "model_grader_refusal_error")
        if self.params.how == "bad":
            raise BadRequest("column 'x' is 3; expected text")
        if self.params.how == "broken":
            raise Failed("this host cannot isolate")
        if self.params.how == "short":
            return []
        verdict: Any = self.params.how if self.params.how in ("time_limit", "wrong") else "ok"
        return [
            Part(value=float(len(item.completion)), verdict=verdict, seconds=0.5) for item in items
        ]


@pytest.fixture(autouse=True)
def probe() -> None:
    Probe.calls, Probe.closed, Probe.running, Probe.most_running = [], [], 0, 0


def scorer(**settings: Any) -> Scorer:
    return Scorer(scripted(**settings))


async def parts(
    scorer: Scorer, completions: str, job_id: str | None = None, **params: Any
) -> list[Part]:
    items = tuple(ScoreItem(prompt="", completion=text) for text in completions.split(","))
    request = ScoreRequest(
        items=items, rewards=(RewardSpec(grader="test_probe", params=params),), job_id=job_id
    )
    return [score.parts["test_probe"] for score in (await scorer.score(request)).scores]


async def test_alike_items_of_a_request_are_graded_once() -> None:
    graded = await parts(scorer(), "aa,b, aa ,b,c")
    assert Probe.calls == [["aa", "b", "c"]]
    assert [(part.value, part.cached, part.seconds) for part in graded] == [
        (2.0, False, 0.5),
        (1.0, False, 0.5),
        (2.0, True, 0.0),
        (1.0, True, 0.0),
        (1.0, False, 0.5),
    ]
    await parts(scorer(), "b,b", pure=False)
    assert Probe.calls[1:] == [["b", "b"]]


def test_content_differs_where_types_differ() -> None:
    bound = Grader.__new__(calling.registry.kind_of("exact_match"))
    Grader.__init__(bound, RewardSpec(grader="exact_match"), Params(), scripted())
    rows: list[Any] = [1, 1.0, True, "1", [1], None, "\ud800"]
    assert len(
        {key_of(bound, ScoreItem(prompt="", completion="", row={"x": value})) for value in rows}
    ) == len(rows)


async def test_calls_take_so_many_items_and_so_many_at_once() -> None:
    await parts(scorer(), ",".join("abcdefgh"), size=3, at_once=2)
    assert sorted(map(len, Probe.calls)) == [2, 3, 3]
    assert Probe.most_running == 2


async def test_the_bound_on_calls_holds_over_requests() -> None:
    once = scorer()
    await asyncio.gather(
        *(parts(once, text, at_once=3, size=1) for text in ("a,b,c", "d,e,f", "g,h,i"))
    )
    assert (len(Probe.calls), Probe.most_running) == (9, 3)


@pytest.mark.parametrize(
    ("how", "detail", "flag"),
    [
        ("raise", "KeyError: 'lost'", "python_grader_runtime_error"),
        ("fail", "the judge refused", "model_grader_refusal_error"),
        ("bad", "column 'x' is 3; expected text", "invalid_variable_error"),
        ("short", "the grader returned 0 verdicts for 1 completions", "other_error"),
        ("hang", "not done within 0.1 s", "unresponsive_reward_error"),
    ],
)
async def test_a_grader_that_fails_gives_missing_rewards_with_a_reason(
    how: str, detail: str, flag: str
) -> None:
    deadline_s = 0.1 if how == "hang" else 30.0
    (part,) = await parts(scorer(), "a", how=how, deadline_s=deadline_s)
    assert (part.value, part.verdict, part.detail, part.errors) == (None, "error", detail, (flag,))
    assert part.seconds > 0


async def test_a_long_text_that_waits_for_a_thread_is_not_blamed_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that wait for a disk are the host's doing: no 0 for the text."""
    monkeypatch.setattr(registry.kind_of("exact_match"), "deadline_s", 0.1)
    loop, over = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    hung = loop.run_in_executor(None, over.wait)
    texts = ("5", "5" + " " * 20_000)
    items = tuple(ScoreItem(prompt="", completion=text, row={"right": "5"}) for text in texts)
    reward = RewardSpec(grader="exact_match", params={"column": "right"})
    grading = asyncio.create_task(scorer().score(ScoreRequest(items=items, rewards=(reward,))))
    await asyncio.sleep(0.3)
    over.set()
    assert await hung
    assert [score.value for score in (await grading).scores] == [1.0, 1.0]


async def test_only_a_broken_service_ends_the_request() -> None:
    with pytest.raises(Failed, match="this host cannot isolate"):
        await parts(scorer(), "a,b", how="broken", size=1)


async def test_a_failing_grader_leaves_the_others_verdicts() -> None:
    rewards = (
        RewardSpec(grader="test_probe", params={"how": "raise"}),
        RewardSpec(grader="length", params={"max": 5}),
    )
    request = ScoreRequest(items=(ScoreItem(prompt="", completion="abc"),), rewards=rewards)
    (score,) = (await scorer().score(request)).scores
    assert (score.value, score.parts["length"].value) == (None, 1.0)


async def test_graders_are_kept_and_closed_when_others_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calling, "MAX_KEPT", 2)
    once = scorer()
    slow = asyncio.create_task(parts(once, "a", job_id="slow", how="hang", deadline_s=0.3))
    await asyncio.sleep(0.05)
    for job_id in ("one", "one", "two", "three"):
        await parts(once, "a", job_id=job_id)
    assert Probe.closed == ["one", "two"], "the slow one is in use"
    await slow
    await once.close()
    assert set(Probe.closed[2:]) == {"slow", "three"}


async def test_a_request_that_is_cancelled_ends_its_grading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "MAX_QUEUED_COMPLETIONS", 1)
    once = scorer()
    request = ScoreRequest(
        items=(
            ScoreItem(prompt="", completion="x", finish_reason="error"),
            ScoreItem(prompt="", completion="a"),
        ),
        rewards=(RewardSpec(grader="test_probe", params={"how": "hang", "deadline_s": 60.0}),),
    )
    grading = asyncio.create_task(once.score(request))
    await asyncio.sleep(0.05)
    with pytest.raises(Busy, match="2 completions wait or run and 1 more were sent; at most 1 may"):
        await parts(once, "b")
    start = time.monotonic()
    grading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grading
    assert time.monotonic() - start < 10, "long before the deadline of the call"
    assert [part.value for part in await parts(once, "b")] == [1.0]
    assert len(asyncio.all_tasks()) == 1
