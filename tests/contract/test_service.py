"""The contract every service keeps, through the real client and a real application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx2 as httpx
import pytest
import structlog
from pydantic import SecretStr

from shared.errors import (
    BadRequest,
    Conflict,
    Failed,
    HoneError,
    NotFound,
    StateLost,
    Unauthorized,
    Unavailable,
)
from shared.http import codec, ownership
from shared.http.client import Client
from shared.http.operations import BUSY_CHECK_S, Operations
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import (
    Checkpoint,
    CheckpointRequest,
    GenerateRequest,
    Logprobs,
    Rollout,
    RolloutGroup,
    Sampling,
    TokenIds,
    VersionInfo,
)
from tests.support.in_process import in_process


class Counter:
    """A service whose one operation counts how often it really ran."""

    def __init__(self, settings: Settings, *, natural: bool = False) -> None:
        self.runs = 0
        self.seconds = 0.0
        self.error: Exception | None = None
        self.waits_for: str | None = None
        self.service = Service(
            "trainer",
            settings,
            readiness={"engine": self._ready},
            version_info=lambda: {"engine": "1.0"},
        )
        key = (lambda request: f"{request.job_id}:{request.step}") if natural else None
        self.service.operation("POST", "/checkpoints", self.work, key=key)

    async def _ready(self) -> str | None:
        return self.waits_for

    async def work(self, request: CheckpointRequest) -> Checkpoint:
        self.runs += 1
        await asyncio.sleep(self.seconds)
        if self.error:
            raise self.error
        return Checkpoint(step=request.step, path="/x", size_bytes=self.runs)

    def client(self, **options: object) -> Client:
        transport = httpx.ASGITransport(app=self.service.app, raise_app_exceptions=False)
        return Client("trainer", "http://localhost", transport=transport, **options)  # type: ignore[arg-type]


def request(step: int = 1) -> CheckpointRequest:
    return CheckpointRequest(job_id="job", step=step)


async def call(
    client: Client, step: int = 1, *, key: str | None = None, deadline_s: float = 5.0
) -> Checkpoint:
    return await client.call(
        "POST", "/checkpoints", request(step), Checkpoint, deadline_s=deadline_s, key=key
    )


@pytest.mark.parametrize("binary", [False, True])
async def test_a_call_answers_in_json_and_in_msgpack(settings: Settings, binary: bool) -> None:
    assert (await call(Counter(settings).client(binary=binary), 7)).step == 7


async def test_the_same_key_happens_once_and_gets_the_same_answer(settings: Settings) -> None:
    counter = Counter(settings)
    client = counter.client()
    together = await asyncio.gather(*(call(client, key="a") for _ in range(5)))
    later = await call(client, key="a")
    assert counter.runs == 1 and {answer.size_bytes for answer in (*together, later)} == {1}


async def test_a_natural_key_needs_no_header(settings: Settings) -> None:
    counter = Counter(settings, natural=True)
    client = counter.client()
    await asyncio.gather(call(client, 3), call(client, 3), call(client, 4))
    assert counter.runs == 2


async def test_the_same_key_with_another_body_is_a_conflict(settings: Settings) -> None:
    client = Counter(settings).client()
    await call(client, 1, key="a")
    with pytest.raises(Conflict, match="was already asked for with another body"):
        await call(client, 2, key="a")


async def test_work_longer_than_the_wait_is_polled_for(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.http.client.WAIT_S", 0)
    counter = Counter(settings)
    counter.seconds = 0.3
    assert (await call(counter.client(), 2)).step == 2
    assert counter.runs == 1


@pytest.mark.parametrize("binary", [False, True])
async def test_a_large_body_arrives_whole_again_when_it_is_retried(
    settings: Settings, binary: bool
) -> None:
    service = Service("rollout", settings)
    taken: list[int] = []

    async def work(request: GenerateRequest) -> Checkpoint:
        assert isinstance(request.prompt, str)
        taken.append(len(request.prompt))
        if len(taken) == 1:
            raise Unavailable("starting")
        return Checkpoint(step=0, path="/x", size_bytes=len(request.prompt))

    service.operation("POST", "/generate", work)
    transport = httpx.ASGITransport(app=service.app)
    client = Client("rollout", "http://localhost", transport=transport, binary=binary)
    body = GenerateRequest(prompt="x" * 3_000_000)
    answer = await client.call("POST", "/generate", body, Checkpoint, deadline_s=60)
    assert answer.size_bytes == 3_000_000 and taken == [3_000_000] * 2
    await client.close()


async def test_a_single_operation_is_asked_for_without_waiting_for_others(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.http.connecting.GATHER_S", 60.0)
    counter = Counter(settings)
    counter.seconds = 0.05
    answer = await counter.client().call(
        "POST", "/checkpoints", request(2), Checkpoint, deadline_s=30, wait_s=0
    )
    assert (answer.step, counter.runs) == (2, 1)


class Counting(httpx.AsyncBaseTransport):
    """Counts the requests that wait on the other side, and the most there were."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner, self.open, self.most, self.polls = inner, 0, 0, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.polls += request.url.path == "/operations/wait"
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            return await self.inner.handle_async_request(request)
        finally:
            self.open -= 1


def polled_for(client: Client, step: int = 1) -> asyncio.Task[Checkpoint]:
    """A call whose result is polled for from the start."""
    work = client.call("POST", "/checkpoints", request(step), Checkpoint, deadline_s=60, wait_s=0)
    return asyncio.create_task(work)


async def test_many_operations_are_waited_for_on_few_connections(settings: Settings) -> None:
    service = Service("rollout", settings)
    begun = asyncio.Semaphore(0)
    ends = {step: asyncio.Event() for step in range(50)}

    async def work(request: CheckpointRequest) -> Checkpoint:
        begun.release()
        await ends[request.step].wait()
        return Checkpoint(step=request.step, path="/x", size_bytes=1)

    service.operation("POST", "/checkpoints", work)
    transport = Counting(httpx.ASGITransport(app=service.app))
    client = Client("rollout", "http://localhost", transport=transport)

    tasks = [polled_for(client, step) for step in range(50)]
    for _ in tasks:
        await begun.acquire()
    while transport.polls < 1 or transport.open > 4:
        await asyncio.sleep(0.01)
    transport.most = 0
    for step in (49, 0, 20):  # whichever ends comes at once, and alone
        ends[step].set()
        assert (await tasks[step]).step == step
    assert sum(task.done() for task in tasks) == 3 and transport.most <= 5
    for end in ends.values():
        end.set()
    assert [(await task).step for task in tasks] == list(range(50))
    await client.close()


def held_up(settings: Settings, busy: Callable[[], int]) -> tuple[Counting, Client, asyncio.Event]:
    """Returns a client of a service that is as busy as that, its transport, and the event that the
    service's operations wait for."""
    service = Service("rollout", settings, busy=busy)
    end = asyncio.Event()

    async def work(request: CheckpointRequest) -> Checkpoint:
        await end.wait()
        return Checkpoint(step=request.step, path="/x", size_bytes=1)

    service.operation("POST", "/checkpoints", work)
    transport = Counting(httpx.ASGITransport(app=service.app))
    return transport, Client("rollout", "http://localhost", transport=transport), end


async def test_who_polls_for_a_result_is_told_when_there_is_room_for_more(
    settings: Settings,
) -> None:
    busy = [3]
    transport, client, end = held_up(settings, lambda: busy[0])
    heard: list[int] = []
    client.poller.busy_below = lambda: 3 if not heard else None
    client.poller.heard = heard.append
    task = polled_for(client)
    while not transport.polls:
        await asyncio.sleep(0.01)
    assert not heard
    busy[0] = 2
    while not heard:
        await asyncio.sleep(0.01)
    assert heard == [2] and not task.done()
    end.set()
    assert (await task).step == 1
    await client.close()


async def test_who_knows_that_there_is_room_is_told_again_only_of_a_change(
    settings: Settings,
) -> None:
    busy = [2]
    transport, client, end = held_up(settings, lambda: busy[0])
    heard: list[int] = []
    client.poller.busy_below, client.poller.heard = lambda: 3, heard.append
    task = polled_for(client)
    while not heard:
        await asyncio.sleep(0.01)
    await asyncio.sleep(5 * BUSY_CHECK_S)
    assert heard == [2] and transport.polls == 2
    busy[0] = 4
    await asyncio.sleep(5 * BUSY_CHECK_S)
    assert heard == [2]
    busy[0] = 2
    while len(heard) < 2:
        await asyncio.sleep(0.01)
    assert heard == [2, 2] and not task.done()
    end.set()
    assert (await task).step == 1
    await client.close()


async def test_a_client_that_disconnects_cancels_nothing(settings: Settings) -> None:
    counter = Counter(settings)
    counter.seconds = 0.2
    client = counter.client()
    with pytest.raises(Unavailable, match=r"did not finish POST /checkpoints within 0\.05 s"):
        await call(client, key="a", deadline_s=0.05)
    counter.seconds = 0.0
    assert (await call(client, key="a")).size_bytes == 1
    assert counter.runs == 1


async def test_failed_work_is_tried_again_when_asked_again(settings: Settings) -> None:
    counter = Counter(settings)
    client = counter.client()
    counter.error = Failed("the disk is full")
    with pytest.raises(Failed, match="the disk is full"):
        await call(client, key="a")
    counter.error = None
    assert (await call(client, key="a")).size_bytes == 2


@pytest.mark.parametrize("kind", [BadRequest, Conflict, Failed, NotFound, StateLost])
async def test_an_error_crosses_the_wire_as_itself_and_is_not_retried(
    settings: Settings, kind: type[HoneError]
) -> None:
    counter = Counter(settings)
    counter.error = kind("got 7, expected 6", code="stale")
    with pytest.raises(kind, match="got 7, expected 6") as raised:
        await call(counter.client())
    assert type(raised.value) is kind and raised.value.code == "stale"
    assert counter.runs == 1


async def test_only_an_unknown_operation_is_asked_for_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.http.client.WAIT_S", 0)
    counter = Counter(settings)
    counter.seconds = 0.3
    task = asyncio.create_task(call(counter.client()))
    await asyncio.sleep(0.1)
    counter.service.operations = Operations(10.0, counter.service.draining)  # as after a restart
    assert (await task).size_bytes == counter.runs == 2
    counter.error = NotFound("no operation of that kind: the sentence decides nothing")
    with pytest.raises(NotFound):
        await call(counter.client())
    assert counter.runs == 3


async def test_work_that_took_longer_than_the_patience_is_asked_for_again_after_a_restart(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.http.client.WAIT_S", 0)
    counter = Counter(settings)
    counter.seconds = 1.0
    task = asyncio.create_task(call(counter.client(patience_s=0.4)))
    await asyncio.sleep(0.6)
    counter.seconds = 0.0
    counter.service.operations = Operations(10.0, counter.service.draining)  # as after a restart
    assert (await task).size_bytes == counter.runs == 2


async def test_a_bug_is_a_failure_that_names_the_exception(settings: Settings) -> None:
    counter = Counter(settings)
    counter.error = ZeroDivisionError("division by zero")
    with pytest.raises(Failed, match="ZeroDivisionError: division by zero"):
        await call(counter.client())


async def test_an_unreachable_service_is_named_with_its_address() -> None:
    client = Client("trainer", "http://127.0.0.1:9")
    with pytest.raises(
        Unavailable, match=r"cannot reach the trainer service at http://127\.0\.0\.1:9"
    ):
        await call(client, deadline_s=0.3)
    await client.close()


async def test_a_service_that_stays_unreachable_is_given_up_long_before_the_deadline(
    settings: Settings,
) -> None:
    counter = Counter(settings)
    counter.error = Unavailable("the engine process died; PUT /model starts a new one")
    with pytest.raises(Unavailable, match="the engine process died"):
        await call(counter.client(patience_s=0.5), deadline_s=600)
    assert 2 <= counter.runs <= 5


async def test_the_log_says_once_that_a_service_is_unreachable_and_once_that_it_is_back(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.http.connecting.AWAY_S", 0.1)
    counter = Counter(settings)
    counter.error = Unavailable("starting")
    asked = asyncio.create_task(call(counter.client()))
    with structlog.testing.capture_logs() as logs:
        await asyncio.sleep(1.0)
        counter.error = None
        await asked
    gone, back = [line for line in logs if "waits_for" in line]
    trainer = {"log_level": "warning", "waits_for": "the trainer service"}
    assert gone == {"event": "service unreachable", "reason": "starting"} | trainer
    assert back == {"event": "service back", "seconds": back["seconds"]} | trainer


async def test_what_a_proxy_answers_is_retried(settings: Settings) -> None:
    answers = iter([(502, b"<html>Bad Gateway</html>"), (500, b"Internal Server Error")])

    async def proxy(request: httpx.Request) -> httpx.Response:
        status, content = next(answers, (200, b'{"step":1,"path":"/x","size_bytes":7}'))
        return httpx.Response(status, content=content)

    client = Client("trainer", "http://localhost", transport=httpx.MockTransport(proxy))
    assert (await call(client)).size_bytes == 7


async def test_a_bad_body_is_a_problem_document_with_pointers(settings: Settings) -> None:
    async with in_process(Counter(settings).service.app) as http:
        response = await http.post("/checkpoints", json={"job_id": "job", "stp": 1})
    assert (
        response.status_code == 422
        and response.headers["content-type"] == "application/problem+json"
    )
    document = response.json()
    assert document["title"] == "Bad request" and {
        fault["pointer"] for fault in document["errors"]
    } == {"/stp", "/step"}
    assert document["error"]["message"] == document["detail"]


async def test_a_form_post_and_a_rebound_host_of_a_web_page_are_refused(settings: Settings) -> None:
    async with in_process(Counter(settings).service.app) as http:
        sneaky = await http.post(
            "/checkpoints",
            content=b'{"job_id":"job","step":1}',
            headers={"content-type": "text/plain"},
        )
        packed = await http.post(
            "/checkpoints",
            content=b"{}",
            headers={"content-type": codec.JSON, "content-encoding": "gzip"},
        )
        rebound = await http.get("/metrics", headers={"host": "evil.example:8002"})
    assert sneaky.status_code == 422 and "Content-Type" in sneaky.json()["detail"]
    said = "Content-Encoding is 'gzip'; expected an uncompressed body"
    assert (packed.status_code, packed.json()["detail"]) == (422, said)
    assert rebound.status_code == 401 and "evil.example" in rebound.json()["detail"]


async def test_a_token_guards_everything_but_health(settings: Settings) -> None:
    counter = Counter(settings.model_copy(update={"token": SecretStr("open-sesame")}))
    async with in_process(counter.service.app) as http:
        assert [
            (await http.get(path)).status_code for path in ("/healthz", "/readyz", "/version")
        ] == [200, 200, 200]
        assert (await http.get("/metrics")).status_code == 401
    with pytest.raises(Unauthorized):
        await call(counter.client(token="guess"))
    assert (await call(counter.client(token="open-sesame"))).step == 1


async def test_who_shows_no_token_speaks_for_no_job(settings: Settings) -> None:
    """Else anybody could keep a trainer for a job that is gone, or give it to an invented one."""
    counter = Counter(settings.model_copy(update={"token": SecretStr("open-sesame")}))
    headers, owned = ownership.headers("1f" * 16, settings, "job"), counter.service.ownership
    for token in (None, "guess"):
        await counter.client(token=token, headers=headers).get("/version", VersionInfo)
    ownership.asking.set(None)
    assert owned.taken() is None
    await counter.client(token="open-sesame", headers=headers).get("/version", VersionInfo)
    ownership.asking.set(None)
    assert "has job 'job'" in (owned.taken() or "")


async def test_health_says_what_is_waited_for(settings: Settings) -> None:
    counter = Counter(settings)
    async with in_process(counter.service.app) as http:
        counter.waits_for = "loading the model"
        starting = await http.get("/readyz")
        counter.waits_for = None
        ready = await http.get("/readyz")
        version = (await http.get("/version")).json()
        metrics = (await http.get("/metrics")).text
    assert starting.status_code == 503
    assert starting.json()["dependencies"] == {
        "engine": {"ok": False, "detail": "loading the model", "starting": False}
    }
    assert ready.status_code == 200
    assert version["service"] == "trainer" and version["engine"] == "1.0"
    assert "hone_http_requests_total" in metrics


async def test_a_body_over_the_limit_is_refused_unread(settings: Settings) -> None:
    small = Counter(settings.model_copy(update={"max_body_mib": 1}))
    async with in_process(small.service.app) as http:
        response = await http.post(
            "/checkpoints", content=b" " * (1 << 20 | 1), headers={"content-type": codec.JSON}
        )
    assert response.status_code == 422 and "at most 1048576" in response.json()["detail"]


class Groups:
    """Answers with as many tokens as are asked for."""

    def __init__(self, settings: Settings) -> None:
        self.service = Service("rollout", settings)
        self.service.operation("POST", "/generate", self.generate)

    async def generate(self, request: GenerateRequest) -> RolloutGroup:
        num_tokens = request.sampling.max_tokens
        rollout = Rollout(
            text="ab" * num_tokens,
            token_ids=TokenIds(range(num_tokens)),
            logprobs=Logprobs(-token / 7 for token in range(num_tokens)),
            finish_reason="length",
        )
        return RolloutGroup(prompt_token_ids=TokenIds((1,)), rollouts=(rollout,))


@pytest.mark.parametrize(
    ("num_tokens", "encodings", "is_compressed"),
    [
        (2000, "gzip, deflate", True),
        (20_000, "gzip", True),
        (2000, "identity", False),
        (20, "gzip", False),
    ],
)
async def test_a_large_answer_is_compressed_for_those_who_take_it(
    settings: Settings, num_tokens: int, encodings: str, is_compressed: bool
) -> None:
    body = GenerateRequest(prompt="a", sampling=Sampling(max_tokens=num_tokens))
    headers = {"accept": codec.MSGPACK, "accept-encoding": encodings}
    headers["content-type"] = codec.JSON
    async with in_process(Groups(settings).service.app) as http:
        answer = await http.post("/generate", content=codec.encode(body), headers=headers)
    group = codec.decode(RolloutGroup, answer.content, codec.MSGPACK)
    assert group.rollouts[0].token_ids == list(range(num_tokens))
    assert (answer.headers.get("content-encoding") == "gzip") is is_compressed
    sent_bytes = int(answer.headers["content-length"])
    assert (sent_bytes < 8 * num_tokens) is is_compressed, "10 bytes per token as it is"


async def test_a_request_id_comes_back(settings: Settings) -> None:
    async with in_process(Counter(settings).service.app) as http:
        assert (await http.get("/healthz", headers={"x-request-id": "abc-1"})).headers[
            "x-request-id"
        ] == "abc-1"
        assert len((await http.get("/healthz")).headers["x-request-id"]) == 16


async def test_a_method_that_a_route_has_not_is_refused_with_those_it_has(
    settings: Settings,
) -> None:
    async with in_process(Counter(settings).service.app) as http:
        answer = await http.delete("/version")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    problem = answer.json()
    assert (problem["code"], problem["detail"]) == (
        "not_found",
        "no route DELETE /version; this path has GET",
    )


async def test_an_unknown_parameter_of_a_query_is_refused_by_name(settings: Settings) -> None:
    counter = Counter(settings)
    async with in_process(counter.service.app) as http:
        answer = await http.get("/version?verbose=1")
        assert (answer.status_code, answer.json()["detail"]) == (
            422,
            "unknown parameter 'verbose' of GET /version; it takes none",
        )
        answer = await http.get("/operations/1?wiat=1")
        assert answer.json()["detail"] == (
            "unknown parameter 'wiat' of GET /operations/{id}; did you mean 'wait'?"
        )
        assert (await http.get("/version")).status_code == 200
