"""What surrounds vLLM's processes, without vLLM."""

from __future__ import annotations

import asyncio
import logging.config
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.rollout.processes import in_daemon_thread, root_cause, set_environment
from services.rollout.starter import local_folder
from shared.errors import BadRequest


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_the_first_logged_exception_is_the_root_cause(tmp_path: Path) -> None:
    errors = tmp_path / "errors.log"
    errors.write_text(
        "EngineCore failed to start.\nTraceback (most recent call last):\n  File 'x', line 1\n"
        "torch.OutOfMemoryError: tried 4 GiB\n\nDuring handling ...\nRuntimeError: Engine core "
        "initialization failed.\n"
    )
    assert root_cause(errors) == "torch.OutOfMemoryError: tried 4 GiB"


def test_without_logged_errors_there_is_no_root_cause(tmp_path: Path) -> None:
    assert root_cause(tmp_path / "none.log") is None


def test_the_logging_that_vllm_is_given_records_errors_with_their_exception(tmp_path: Path) -> None:
    import json

    errors = set_environment(tmp_path)
    logging.config.dictConfig(json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text()))
    logger = logging.getLogger("vllm.test")
    try:
        raise ValueError("no room for 7 blocks")
    except ValueError:
        logger.exception("EngineCore failed to start.")
    for handler in logging.getLogger("vllm").handlers:
        handler.close()
    logging.getLogger("vllm").handlers.clear()
    assert root_cause(errors) == "ValueError: no room for 7 blocks"


def test_the_environment_sends_no_statistics_and_keeps_the_users_threads(tmp_path: Path) -> None:
    os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
    set_environment(tmp_path)
    assert (os.environ["VLLM_NO_USAGE_STATS"], os.environ["OMP_WAIT_POLICY"]) == ("1", "ACTIVE")


async def test_a_thread_returns_its_value_or_raises_its_error() -> None:
    assert await in_daemon_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0)


async def test_the_loop_goes_on_while_a_thread_works() -> None:
    import threading

    release = threading.Event()
    waiting = asyncio.create_task(in_daemon_thread(release.wait))
    await asyncio.sleep(0)
    assert not waiting.done()
    release.set()
    assert await waiting is True


def test_a_model_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert local_folder(str(tmp_path)) == tmp_path


def test_a_hugging_face_id_is_left_to_the_hub() -> None:
    assert local_folder("Qwen/Qwen2.5-0.5B-Instruct") is None


@pytest.mark.parametrize("model", ["/no/such/folder", "./missing", "../missing", "a/b/c", ""])
def test_what_is_no_model_is_refused_by_name(model: str) -> None:
    with pytest.raises(BadRequest, match="expected"):
        local_folder(model or "a b")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"without config\.json"):
        local_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadRequest, match=r"without \*\.safetensors"):
        local_folder(str(tmp_path))
