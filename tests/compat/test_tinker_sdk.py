"""Every method of the clients of Tinker's SDK against the orchestrator over HTTP, with fake
services behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from services.orchestrator.extensions.tinker import driving
from shared.weights.folders import MANIFEST, STATE
from shared.wire import Checkpoint
from tests.compat.local_hub import MODEL, write_cache
from tests.compat.packages import ROOT, python_with
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack
from tests.support.running import serve

pytestmark = [pytest.mark.compat, pytest.mark.timeout(600)]

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncGenerator[str]:
    """Serves the application, whose lifespan has begun, and yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
    task = asyncio.create_task(serve(server))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def run(stack: Stack, tmp_path: Path, program: str) -> Any:
    """Runs a program with the SDK, and returns what it printed last."""
    cache = write_cache(tmp_path / "hub", 0)
    async with served(stack.app) as url:
        environment = os.environ | {
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": "tml-none",
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",
        }
        python = await asyncio.to_thread(python_with, "tinker-cookbook", torch=True)
        process = await asyncio.create_subprocess_exec(
            python,
            ROOT / "tests/compat" / program,
            MODEL,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out.splitlines()[-1])


NOT_LOADED = "cannot be loaded into an existing model; expected a new model"
REFUSED = {
    "TrainingClient.load_state": NOT_LOADED,
    "TrainingClient.load_state_with_optimizer": NOT_LOADED,
    "ServiceClient.copy_weights": "Provide destination_project_id or set TINKER_PROJECT_ID",
    "RestClient.copy_weights": "expected a new model that begins with the checkpoint",
    "RestClient.whoami": "whoami requires JWT auth",
    "RestClient.publish_checkpoint_from_tinker_path": "nothing is published: an API key",
    "RestClient.unpublish_checkpoint_from_tinker_path": "nothing is published, so nothing can",
    "RestClient.search_sessions": "sessions are not searched; list_sessions lists them",
    "RestClient.assign_session_project": "there are no projects",
    "RestClient.export_session_trace": "no trace of a session is recorded; `hone logs`",
    "RestClient.get_audit_log": "there is no audit log; list_training_runs",
    "RestClient.get_billing_usage": "nothing is billed",
    "RestClient.get_current_checkpoint_storage_usage": "nothing is billed; list_user_checkpoints",
    "AdminClient.get_audit_log": "there is no audit log; list_training_runs",
    "AdminClient.get_billing_usage": "nothing is billed",
    "AdminClient.get_current_checkpoint_storage_usage": "nothing is billed; list_user_checkpoints",
    # their twins delete what is gone already
    "RestClient.delete_checkpoint_async": "has no 'external_weights/export', or no longer has it",
    "RestClient.delete_checkpoint_from_tinker_path_async again": "has no 'weights/last', or no",
    "RestClient.delete_checkpoint_from_tinker_path": "'end' is used by job",
}
"""The methods that are refused, and what the sentence says; all others work."""


async def test_every_method_of_the_sdk_works_or_is_refused_with_a_sentence(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "IDLE_S", 0.5)  # models make room for each other

    def loadable(checkpoint: Checkpoint) -> Checkpoint:
        assert stack.fakes.job
        folder = Path(checkpoint.path)
        (folder / STATE).mkdir(parents=True, exist_ok=True)
        source = stack.fakes.job.job.model_dump(mode="json")
        (folder / MANIFEST).write_text(json.dumps({"job": source, "files": {}}))
        return checkpoint

    stack.fakes.change["checkpoint"] = loadable
    found = await run(stack, tmp_path, "tinker_methods.py")
    assert len(found) > 100
    wrong = {}
    for name, outcome in found.items():
        expected = REFUSED.get(name) or REFUSED.get(name.removesuffix("_async"), "works")
        if expected not in outcome:
            wrong[name] = outcome
    assert not wrong, json.dumps(wrong, indent=1)
