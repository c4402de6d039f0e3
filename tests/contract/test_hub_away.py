"""A Hub that hangs, cannot be reached or lacks what is asked for, when jobs are looked at: the real
`huggingface_hub` and `datasets`, in processes that are killed, against an endpoint of the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.jobs import check_executor
from services.orchestrator.jobs.check_executor import CheckExecutor
from services.orchestrator.jobs.preflight import Preflight
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.status import Caller
from shared.errors import BadRequest, Failed
from shared.host.processes import free_port
from shared.job import Job
from shared.settings import Settings
from tests.support.model_folders import make_model_folder

pytestmark = pytest.mark.slow

NOT_FOUND = (
    b"HTTP/1.1 404 Not Found\r\nx-error-code: RepoNotFound\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


class FakeHub:
    """`answer` is what every request gets; None: nothing, ever. `num_open` counts the connections
    that are open now, `num_asked` those that ever were."""

    def __init__(self, answer: bytes | None = None) -> None:
        self.answer = answer
        self.num_open = 0
        self.num_asked = 0
        self.most_open = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        """Yields its URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def until_open(self, count: int) -> None:
        async with asyncio.timeout(180):
            while self.num_open != count:
                await asyncio.sleep(0.02)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.num_asked += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            while await reader.read(1 << 16):
                if self.answer:
                    writer.write(self.answer)
                    break
        except ConnectionError:
            pass
        finally:
            self.num_open -= 1
            writer.close()


ON_HUB = {"train": "owner/data", "revision": "a" * 40}
LOCAL = {"train": [{"prompt": "1?"}]}


def make_job(model: str, data: dict[str, Any]) -> Job:
    return Job.model_validate(
        {
            "name": "t",
            "model": model,
            "steps": 1,
            "data": data,
            "sampling": {"max_tokens": 4},
            "rewards": [{"grader": "length"}],
        }
    )


async def look(job: Job, executor: CheckExecutor) -> Preflight:
    services = Services.of(Caller(job, executor.settings))
    run = Preflight(job, executor.settings, services, executor)
    try:
        await run.run("data")
        return run
    finally:
        await services.close()


@pytest.fixture
def local_model(tmp_path: Path) -> str:
    return str(make_model_folder(tmp_path / "model"))


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[FakeHub]:
    found = FakeHub()
    async with found.serving() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE")
        yield found


async def test_data_sets_of_a_hub_that_hangs_delay_no_other_job_and_end_with_their_caller(
    hub: FakeHub, settings: Settings, local_model: str
) -> None:
    executor = CheckExecutor(settings)
    looks = [
        asyncio.create_task(look(make_job(local_model, ON_HUB), executor))
        for _ in range(2 * check_executor.MAX_FETCHES)
    ]
    await hub.until_open(check_executor.MAX_FETCHES - 1)
    looked = await asyncio.wait_for(look(make_job(local_model, LOCAL), executor), 120)
    assert looked.data.num_train == 1 and looked.warnings == []
    for looking in looks:
        looking.cancel()
    assert [type(each) for each in await asyncio.gather(*looks, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * len(looks)
    await hub.until_open(0)
    assert hub.most_open < check_executor.MAX_FETCHES, "no caller gets every place"


async def test_a_model_is_waited_for_some_seconds_and_not_asked_for_again_at_once(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_executor, "MODEL_S", 0.5)
    executor = CheckExecutor(settings)
    (said,) = (await look(make_job("owner/model", LOCAL), executor)).warnings
    assert "the model 'owner/model' was not looked at: http://127.0.0.1:" in said
    assert "did not answer in 0.5 s; what is wrong with it shows only when the job begins" in said
    num_asked = hub.num_asked
    assert (await look(make_job("owner/model", LOCAL), executor)).warnings == [said]
    with pytest.raises(Failed, match="the job's data cannot be fetched: http:"):
        await look(make_job("owner/model", ON_HUB), executor)
    assert hub.num_asked == num_asked


async def test_a_name_of_no_model_is_refused_before_the_hub_is_asked(
    hub: FakeHub, settings: Settings
) -> None:
    with pytest.raises(BadRequest, match="no folder 'gpt-4o-mini' here, and ids of the Hugging"):
        await look(make_job("gpt-4o-mini", ON_HUB), CheckExecutor(settings))
    assert hub.num_asked == 0
    with pytest.raises(BadRequest, match="there is no folder"):
        await look(make_job("./no/model", ON_HUB), CheckExecutor(settings))
    assert hub.num_asked == 0


async def test_a_hub_that_cannot_be_reached_is_one_sentence(
    hub: FakeHub, settings: Settings, local_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setattr(check_executor, "MODEL_S", 300.0)  # its process may be slow to start
    executor = CheckExecutor(settings)
    with pytest.raises(Failed) as refused:
        await look(make_job(local_model, ON_HUB), executor)
    assert refused.value.detail == (
        f"dataset 'owner/data' cannot be fetched: {url} cannot be reached ([Errno 111] Connection "
        "refused); name a file, or a mirror of the Hub by HF_ENDPOINT; with HF_HUB_OFFLINE=1 the "
        "orchestrator takes what is in its Hugging Face cache"
    )
    (said,) = (await look(make_job("owner/model", LOCAL), executor)).warnings
    assert f"was not looked at: {url} cannot be reached ([Errno 111] Connection refused)" in said


async def test_what_the_hub_does_not_have_is_refused(
    hub: FakeHub, settings: Settings, local_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_executor, "MODEL_S", 300.0)  # its process may be slow to start
    hub.answer = NOT_FOUND
    with pytest.raises(BadRequest, match="the Hub has no model 'owner/model' at revision 'main'"):
        await look(make_job("owner/model", LOCAL), CheckExecutor(settings))
    with pytest.raises(BadRequest, match="the Hub has no dataset 'owner/data' at revision 'aaaa"):
        await look(make_job(local_model, ON_HUB), CheckExecutor(settings))
