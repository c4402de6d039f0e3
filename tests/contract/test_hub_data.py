"""Data sets of the Hub: a commit that this machine has is taken from its cache, and a download that
hangs keeps no job."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import re
import shutil
import threading
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets.config
import pyarrow
import pytest
from pyarrow.parquet import write_table

from services.orchestrator.data import sources
from services.orchestrator.data.sources import fetch, needs_hub, source_requests
from services.orchestrator.data.subprocesses import run_in_subprocess
from services.orchestrator.grpo.prompts import load_prompts
from shared.errors import BadRequest, Unavailable
from shared.job import Job
from shared.settings import Settings
from tests.support import orchestrator_stack
from tests.support.model_folders import make_model_folder
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

COMMIT = "a" * 40


class DataHub:
    """Has `owner/data` at COMMIT: rows of `prompt` and `answer`, or the file `parquet`. Unless it
    `answers`, requests wait. `num_asked` counts the requests."""

    def __init__(self, num_rows: int = 20, parquet: bytes | None = None) -> None:
        self.name = "train.parquet" if parquet else "train.jsonl"
        rows = ({"prompt": f"{i}?", "answer": i} for i in range(num_rows))
        self.file = parquet or "".join(json.dumps(row) + "\n" for row in rows).encode()
        self.answers = threading.Event()
        self.answers.set()
        self.num_asked = 0

    @contextlib.contextmanager
    def serving(self) -> Generator[str]:
        """Yields its URL."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.num_asked += 1
                hub.answers.wait()
                status, headers, body = hub._answer(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: Any, **__: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            self.answers.set()
            server.shutdown()
            server.server_close()

    def _answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        tag, known = hashlib.sha1(self.file).hexdigest(), {"x-repo-commit": COMMIT}
        entry = {"type": "file", "path": self.name, "size": len(self.file), "oid": tag}
        if re.search(rf"/resolve/[^/]+/{self.name}$", path):
            return 200, {**known, "etag": f'"{tag}"'}, self.file
        if "/resolve/" in path:
            return 404, {**known, "x-error-code": "EntryNotFound"}, b""
        if "/tree/" in path:
            return 200, {}, json.dumps([entry]).encode()
        info = {"id": "owner/data", "sha": COMMIT, "siblings": [], "private": False, "tags": []}
        return 200, {}, json.dumps(info).encode()


stack = orchestrator_stack.stack  # fixture

DEADLINE_S = 120.0  # a process may be slow to start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def cache(folder: Path) -> Iterator[Path]:
    """The folder in which data sets are kept, here and in processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "hf"))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "hf/datasets")
        yield folder / "hf/datasets"


@pytest.fixture(scope="module")
def hub(cache: Path, job: Job) -> Iterator[DataHub]:
    """A Hub whose data set this machine has."""
    hub = DataHub()
    with hub.serving() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", url)
        patch.delenv("HF_HUB_OFFLINE")
        asyncio.run(fetch(source_requests(job, Settings()).values()))
        assert hub.num_asked > 0
        yield hub


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    return Job.model_validate(
        {
            "name": "demo",
            "model": str(make_model_folder(folder / "model")),
            "steps": 2,
            "data": {"train": "owner/data", "revision": COMMIT},
            "sampling": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 4},
            "rewards": [{"grader": "exact_match"}],
        }
    )


async def test_a_commit_that_this_machine_has_is_read_without_the_hub(
    hub: DataHub, settings: Settings, job: Job
) -> None:
    num_asked = hub.num_asked
    hub.answers.clear()
    async with asyncio.timeout(DEADLINE_S):
        await fetch(source_requests(job, settings).values())
        assert not await asyncio.to_thread(needs_hub, job, settings)
        prompts = await run_in_subprocess(_read, job, settings, {}, deadline_s=DEADLINE_S)
    hub.answers.set()
    assert prompts == (20, {"train": COMMIT}, ["0?", "1?"])
    assert hub.num_asked == num_asked


async def test_no_other_commit_is_taken_for_the_one_of_the_submission(
    hub: DataHub, settings: Settings, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` takes the newest that it has, whatever was asked for, where the Hub is
    unreachable."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=f"does not have its commit {'b' * 40}"):
        await run_in_subprocess(_read, job, settings, {"train": "b" * 40}, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("megabytes", [1, 8])
async def test_a_parquet_file_whose_rows_take_far_more_is_refused_before_they_are_written(
    job: Job, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megabytes: int
) -> None:
    """200 rows share a text: they take 0.2 GB, or 1.6."""
    content = io.BytesIO()
    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 200), pyarrow.array([megabytes * 1_000_000 * "x"])
    )
    table = pyarrow.table({"prompt": ["1?"] * 200, "text": text})
    write_table(table, content, compression="zstd", store_schema=False)  # reads as plain text
    assert content.tell() < 20_000
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf/datasets")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with DataHub(parquet=content.getvalue()).serving() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        asked = source_requests(job, settings).values()
        if megabytes == 1:
            return await fetch(asked)
        with pytest.raises(BadRequest, match=r"a file of dataset 'owner/data' has \d+ bytes, and"):
            await fetch(asked)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.arrow")) == 0


def _read(job: Job, settings: Settings, versions: dict[str, str]) -> Any:
    prompts = load_prompts(job, settings, versions)
    assert prompts.train is not None
    first = [str(problem.row["prompt"]) for problem in prompts.train[:2]]
    return prompts.num_train, prompts.versions, first


async def test_a_job_whose_data_the_hub_does_not_give_waits_and_stops_when_asked_to(
    hub: DataHub, stack: Stack, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one on this Hub's data: it removes what this machine has of it."""
    training = stack.fakes.hold("train_step")
    first = await stack.submit()
    second = await stack.submit()
    await asyncio.wait_for(training.reached.wait(), DEADLINE_S)
    await asyncio.to_thread(shutil.rmtree, cache)
    hub.answers.clear()
    monkeypatch.setattr(sources, "FETCH_S", 2.0)
    training.released.set()
    assert (await stack.until(first.id)).status == "succeeded"
    async with asyncio.timeout(DEADLINE_S):
        while (await stack.get(second.id)).recoveries < 2:
            await asyncio.sleep(0.05)
    said = [event.message for event in await stack.events(second.id)]
    why = "fetching the data 'owner/data' did not finish within 2 s"
    assert f"{why}; loading the job again (recovery 2)" in said
    await stack.post(f"{second.id}/pause")
    assert (await stack.until(second.id, "paused")).error == "paused on request"
    monkeypatch.setattr(sources, "FETCH_S", 1200.0)
    hub.answers.set()
    await stack.post(f"{second.id}/resume")
    assert (await stack.until(second.id, "succeeded", "paused", "failed")).status == "succeeded"
