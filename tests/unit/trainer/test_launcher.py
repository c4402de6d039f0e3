"""`python -m services.trainer` says what is wrong in one sentence and exits with 2, before anything
heavy is loaded; and it starts ranks that died again, not for ever, knowing which died and of
what."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from services.trainer.engine import PassBudget
from services.trainer.processes import launcher, ranks
from services.trainer.processes.agent import describe
from services.trainer.processes.launcher import Launcher, LaunchFolder, RestartHistory
from shared.errors import Unavailable
from shared.settings import Settings
from tests.support.trainer_fakes import job_request

ROOT = Path(__file__).parents[3]


def start(**environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    return subprocess.run(
        [sys.executable, "-m", "services.trainer"],
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"HONE_TRAINER_RANKS": "0"}, "'HONE_TRAINER_RANKS': got '0'"),
        (
            {"HONE_TRAINER_NODES": "2"},
            "HONE_TRAINER_NODES is 2 and HONE_TRAINER_RENDEZVOUS is not set",
        ),
        ({"HONE_HOST": "0.0.0.0"}, "without a token a service listens on this machine only"),
    ],
)
def test_a_bad_setting_is_one_sentence(environment, sentence):
    done = start(**environment)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use_is_one_sentence():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        done = start(HONE_TRAINER_PORT=port)
    assert done.returncode == 2
    assert done.stderr.startswith(f"the trainer service cannot listen on 127.0.0.1:{port}")
    assert len(done.stderr.splitlines()) == 1


def test_the_launcher_does_not_import_torch():
    code = "import sys, services.trainer.__main__; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.fixture
def quick(monkeypatch) -> Iterator[None]:
    """Short pauses, and the signal handlers as they were."""
    monkeypatch.setattr(launcher, "FIRST_PAUSE_S", 0.01)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_trainers_and_ranks_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = Settings(trainers=2, trainer_ranks=4)
    assert launcher.rank_environment(settings)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launcher.rank_environment(settings)["OMP_NUM_THREADS"] == "3"


def run_launcher(monkeypatch, folder: LaunchFolder, code: str, restarts: int) -> int:
    """Runs a launcher whose ranks are that Python code, which gets this life's folder."""
    monkeypatch.setattr(
        launcher, "torchrun_command", lambda _ranks, life: [sys.executable, "-c", code, str(life)]
    )
    monkeypatch.setattr(launcher, "MAX_RESTARTS", restarts)
    return Launcher(Settings(), folder).run()


def test_ranks_that_die_start_again_in_an_empty_folder_until_they_died_too_often(
    tmp_path, monkeypatch, quick
):
    folder = LaunchFolder(tmp_path)
    assert run_launcher(monkeypatch, folder, "import sys; sys.exit(7)", restarts=2) == 7
    assert sorted(path.name for path in tmp_path.glob("life-*")) == ["life-0", "life-1", "life-2"]
    assert folder.past() == RestartHistory(2, "torchrun ended with exit code 7")


DIES_FIVE_TIMES = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1]).parent
lives = len(list(folder.glob("life-*")))
if lives > 5:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
(folder / "failure").write_text(f"rank 3 died in life {lives}")
sys.exit(1)
"""


def test_deaths_of_long_ago_do_not_count_and_the_first_reason_is_kept(tmp_path, monkeypatch, quick):
    monkeypatch.setattr(launcher, "RESTART_WINDOW_S", 0.0)
    folder = LaunchFolder(tmp_path)
    assert run_launcher(monkeypatch, folder, DIES_FIVE_TIMES, restarts=1) == 0
    assert folder.past() == RestartHistory(5, "rank 3 died in life 5")
    assert folder.failure() is None, "each life begins without a reason"


WRITES_A_CHECKPOINT = """
import os, pathlib, signal, sys, time
from services.trainer.processes.launcher import LaunchFolder
folder = LaunchFolder(pathlib.Path(sys.argv[1]).parent)
with folder.writing():
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(SECONDS)
    (folder.path / "finished").touch()
signal.pause()
"""


@pytest.mark.parametrize(
    ("takes_s", "patience_s", "finished"), [(0.5, 60.0, True), (60, 0.2, False)]
)
def test_a_checkpoint_that_is_being_written_is_finished_before_the_ranks_end(
    tmp_path, monkeypatch, quick, takes_s, patience_s, finished
):
    monkeypatch.setattr(launcher, "SAVE_S", patience_s)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = WRITES_A_CHECKPOINT.replace("SECONDS", str(takes_s))
    assert run_launcher(monkeypatch, LaunchFolder(tmp_path), code, restarts=0) == 0
    assert (tmp_path / "finished").exists() is finished


def test_no_checkpoint_is_begun_once_the_launcher_stops_and_several_ranks_write_one(tmp_path):
    folder = LaunchFolder(tmp_path)
    with folder.writing(), LaunchFolder(tmp_path).writing():
        assert not folder.end_writing(0.0)
    assert folder.end_writing(0.0)
    with pytest.raises(Unavailable, match="the trainer is stopping, and begins no checkpoint"):
        folder.writing().__enter__()


def test_ranks_that_may_not_be_started_again_end_the_launcher(tmp_path, monkeypatch, quick):
    assert (
        run_launcher(monkeypatch, LaunchFolder(tmp_path), "import sys; sys.exit(3)", restarts=0)
        == 3
    )
    assert [path.name for path in tmp_path.glob("life-*")] == ["life-0"]


def test_the_run_folder_keeps_the_job_and_the_first_reason(tmp_path):
    folder = LaunchFolder(tmp_path)
    assert folder.job() is None
    folder.remember_job(job_request("a"))
    folder.remember_failure("rank 1 has no memory")
    folder.remember_failure("rank 0 was killed by SIGTERM")
    assert (LaunchFolder(tmp_path).job(), folder.failure()) == (
        job_request("a"),
        "rank 1 has no memory",
    )
    folder.new_life(RestartHistory(1, "rank 1 has no memory"))
    assert (folder.job(), folder.failure(), folder.past().restarts) == (job_request("a"), None, 1)
    folder.remember_job(None)
    assert folder.job() is None


@pytest.mark.parametrize(
    ("exit_codes", "sentence"),
    [
        (
            {0: 1, 1: -9},
            "rank 5 was killed by SIGKILL (signal 9), probably because memory ran out (peak of a "
            "rank: 1.5 GiB)",
        ),
        ({0: -15, 1: -11}, "rank 5 was killed by SIGSEGV (signal 11)"),
        ({0: -15, 1: 3}, "rank 5 ended with exit code 3"),
        ({0: 143, 1: 3}, "rank 5 ended with exit code 3"),
        ({0: 143, 1: -15}, "rank 4 was ended by SIGTERM"),
        ({1: -15, 2: 143}, "rank 5 was killed by SIGTERM (signal 15)"),
    ],
)
def test_the_rank_that_died_first_is_named_and_not_those_that_died_of_it(exit_codes, sentence):
    failures = {
        rank: ProcessFailure(rank, 100 + rank, code, "") for rank, code in exit_codes.items()
    }
    assert describe(failures, first_rank=4, peak_bytes=3 * 2**29) == sentence


def test_rank_0_that_is_asked_to_end_does_not_end_as_if_it_were_done(monkeypatch):
    """torchrun waits for the others of a rank that ended with 0, and they for that rank."""
    left = list[int]()
    monkeypatch.setattr(ranks.signal, "sigwait", lambda _: signal.SIGTERM)
    monkeypatch.setattr(ranks, "leave", lambda code, _: left.append(code))
    server, http, stopping = SimpleNamespace(should_exit=False), Thread(), Event()
    http.start()
    ranks.stop_on_signal(cast(Any, server), http, stopping, cast(Any, None))
    assert (left, server.should_exit, stopping.is_set()) == ([143], True, True)


def test_ranks_that_run_out_of_memory_at_once_are_both_heard(tmp_path):
    folder, request = LaunchFolder(tmp_path), job_request("a")
    with ThreadPoolExecutor() as ranks:
        for _ in range(200):
            budget = PassBudget(64, recomputes=True)
            ends = [ranks.submit(folder.remember_budget, request, budget) for _ in range(2)]
            assert [end.exception() for end in ends] == [None, None]
    assert folder.budget(request) == PassBudget(64, recomputes=True)
    assert [path.name for path in tmp_path.iterdir()] == ["budget.json"]
