"""A job's traces, as a collector gets them over HTTP."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from shared.errors import BadRequest, Failed
from shared.host import logs, tracing
from shared.host.logs import get_logger
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import NoBody, Validated
from tests.support import orchestrator_stack
from tests.support.collector import Collector, Received, collecting
from tests.support.in_process import in_process
from tests.support.orchestrator_stack import Stack

job = orchestrator_stack.job  # fixtures
stack = orchestrator_stack.stack

SERVER = 2
"""The kind of a span that OpenTelemetry has for what a service was asked for."""

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""The example of the W3C's recommendation: version, trace, parent, sampled."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        tracing.configure("orchestrator")
        yield collector
        tracing.close()


def names(spans: list[Received]) -> Counter[str]:
    return Counter(span.name for span in spans)


async def test_a_step_is_one_trace_with_the_services_work_below_it(
    collector: Collector, stack: Stack
) -> None:
    record = await stack.run(steps=4)
    assert record.status == "succeeded"
    tracing.close()

    assert {span.service for span in collector.spans} == {"hone-orchestrator"}
    steps = {root.attributes["hone.step"]: root for root in collector.roots("step")}
    assert sorted(steps) == [0, 1, 2, 3, 4]
    assert all(root.attributes["hone.job"] == record.id for root in steps.values())
    assert len({root.trace for root in steps.values()}) == 5
    assert names(collector.below(steps[0])) == {"eval": 1}
    assert names(collector.below(steps[3])) == {"sample": 1, "train": 1, "publish": 1, "load": 1}
    last = collector.below(steps[4])
    assert names(last) == {
        "sample": 1,
        "train": 1,
        "publish": 1,
        "load": 1,
        "checkpoint": 1,
        "eval": 1,
    }

    groups = collector.below(collector.one_below(steps[4], "sample"))
    assert names(groups) == {"generate": 2, "grade": 2}
    prompts = [group.attributes["hone.prompt"] for group in groups]
    assert sorted(Counter(prompts).values()) == [2, 2]
    asked = {"generate": "POST /generate", "grade": "POST /score"}
    for group in groups:
        (served,) = collector.below(group)
        assert (served.name, served.kind) == (asked[group.name], SERVER)
    held_out = collector.below(collector.one_below(steps[4], "eval"))
    assert names(held_out) == {"generate": 4, "grade": 4}

    for name, route in (
        ("train", "POST /train_step"),
        ("publish", "POST /publish_weights"),
        ("load", "POST /reload_weights"),
        ("checkpoint", "POST /checkpoints"),
    ):
        (served,) = collector.below(collector.one_below(steps[4], name))
        assert (served.name, served.kind) == (route, SERVER)
    assert collector.one_below(steps[4], "publish").attributes == {
        "hone.version": 4,
        "hone.weight_sync": "shm",
    }
    train = collector.one_below(steps[4], "train")
    assert train.attributes["hone.examples"] == len(stack.fakes.trained[-1].examples)
    (loaded,) = collector.roots("load job")
    assert {"loading the job", "loading the model", "publish", "load"} == set(
        names(collector.below(loaded))
    )
    known = {span.id for span in collector.spans}
    assert all(not span.parent or span.parent in known for span in collector.spans)


async def test_what_fails_is_marked_and_what_is_tried_again_is_in_a_trace_of_its_own(
    collector: Collector, stack: Stack
) -> None:
    async def fail_once(_: Any) -> None:
        del stack.fakes.fault["train_step"]
        raise Failed("no")

    stack.fakes.fault["train_step"] = fail_once
    record = await stack.run(steps=1)
    assert record.status == "succeeded"
    tracing.close()
    first, again = [root for root in collector.roots("step") if root.attributes["hone.step"] == 1]
    failed = {root.failed: root for root in (first, again)}
    assert collector.one_below(failed[True], "train").failed
    assert not collector.one_below(failed[False], "train").failed


class Checking:
    """A service with one route, which logs."""

    def __init__(self, settings: Settings) -> None:
        self.service = Service("reward", settings)
        self.service.operation("POST", "/graders/validate", self._check)

    async def _check(self, _: NoBody) -> Validated:
        get_logger().warning("checked")
        return Validated(rewards=())

    async def ask(self, **headers: str) -> None:
        async with in_process(self.service.app) as http:
            response = await http.post("/graders/validate", json={}, headers=headers)
            assert response.status_code == 200


async def test_a_service_continues_with_its_callers_trace_and_logs_its_id(
    collector: Collector, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("reward", settings)
    checking = Checking(settings)
    await checking.ask(traceparent=CALLER)
    await checking.ask()
    await checking.ask(traceparent="00-of-nobody-01")
    tracing.close()
    (span,) = collector.spans
    _, trace, parent, _ = CALLER.split("-")
    assert (span.name, span.trace, span.parent) == ("POST /graders/validate", trace, parent)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line.get("trace_id") for line in lines if line["event"] == "checked"] == [
        trace,
        None,
        None,
    ]


def test_what_is_detached_is_below_no_trace(collector: Collector) -> None:
    with tracing.begin("step").within():
        assert tracing.headers()
        with tracing.detached():
            assert not tracing.headers()
        assert tracing.headers()


def test_without_the_library_a_collector_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    said = r"pip install 'hone-rl\[otel\]'` .*; or unset OTEL_EXPORTER_OTLP_ENDPOINT"
    with pytest.raises(BadRequest, match=said):
        tracing.configure("reward")
