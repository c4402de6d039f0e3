"""What surrounds vLLM's processes, without vLLM."""

from __future__ import annotations

import gc
import logging.config
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.rollout.on_vllm.processes import (
    TemporaryFolder,
    freeze_heap,
    root_cause,
    set_environment,
    stage_of,
)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_the_folder_of_a_killed_service_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live, next = TemporaryFolder(), TemporaryFolder()
    kept = live.make()
    (foreign := tmp_path / "hone-vllm-foreign").mkdir()
    code = (
        "from services.rollout.on_vllm.processes import TemporaryFolder as F; "
        "f = F(); print(f.make())"
    )
    killed = subprocess.run(
        [sys.executable, "-c", f"{code}; import os; os._exit(9)"],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
    )
    left = Path(killed.stdout.strip())
    assert left.parent == tmp_path and left.is_dir()
    made = next.make()
    assert sorted(tmp_path.iterdir()) == sorted([kept, foreign, made])
    live.remove()
    next.remove()
    assert list(tmp_path.iterdir()) == [foreign]


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

    errors, _ = set_environment(tmp_path)
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


def test_what_an_engine_that_starts_is_at_is_read_off_what_vllm_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    _, progress = set_environment(tmp_path)
    config = Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text()
    logging.config.dictConfig(json.loads(config))
    runner = logging.getLogger("vllm.v1.worker.cpu_model_runner")
    stages = [stage_of(progress)]
    for message in (
        "Starting to load model a/b...",
        "other",
        "Warming up model...",
    ):
        runner.info(message)
        stages.append(stage_of(progress))
    logging.getLogger("vllm.config").info("not told")
    runner.warning("told twice")
    for logger in (runner, logging.getLogger("vllm")):
        for handler in logger.handlers:
            handler.close()
        logger.handlers.clear()
    assert stages == [None, "reading the weights", "reading the weights", "warming up"]
    assert "not told" not in progress.read_text()
    assert capsys.readouterr().err == "WARNING vllm.v1.worker.cpu_model_runner: told twice\n"


def test_the_environment_sends_no_statistics_and_keeps_the_users_threads(tmp_path: Path) -> None:
    os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
    set_environment(tmp_path)
    assert (os.environ["VLLM_NO_USAGE_STATS"], os.environ["OMP_WAIT_POLICY"]) == ("1", "ACTIVE")


def test_a_frozen_heap_is_not_gone_through_and_the_one_before_is_collected() -> None:
    class Engine:
        def __init__(self) -> None:
            self.itself = self

    engine = Engine()
    seen = weakref.ref(engine)
    try:
        freeze_heap()
        assert not any(each is engine for each in gc.get_objects())
        del engine
        gc.collect()
        assert seen() is not None
        freeze_heap()
        assert seen() is None
    finally:
        gc.unfreeze()


LEAVES_A_SEMAPHORE = """
import multiprocessing, os, sys
from pathlib import Path
from services.rollout.on_vllm.processes import set_environment
set_environment(Path(sys.argv[1]))
lock = multiprocessing.get_context("spawn").Lock()
os._exit(0)
"""


def test_a_semaphore_that_vllm_leaves_is_removed_without_a_word(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES_A_SEMAPHORE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
