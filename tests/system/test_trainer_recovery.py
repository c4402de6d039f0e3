"""Processes of the trainer that die: all end and none is left, or all come back with their job. Two
ranks, without DeepSpeed."""

from __future__ import annotations

import pytest

from shared.errors import HoneError
from shared.wire import Example
from tests.support.trainer_service import ROOT, a_job, gone, running

pytestmark = [pytest.mark.engine, pytest.mark.system]

LIGHT_RANKS = '''"""Ranks without DeepSpeed start sooner. Rank 1's first update fails while
rank 0 waits for it in a collective."""
import sys, torch, torch.distributed as dist
from services.trainer.processes import commands, ranks
from services.trainer.engine import Update
from services.trainer.trainer import Seams, Trainer

class Engine:
    dtype, device, gpu, weights_bytes = "float32", "cpu", None, 1
    num_parameters, num_trainable, without, num_calls = 1, 1, "", 0
    def __init__(self, job): pass
    def live_weights(self): return {}
    def offload(self): pass
    def reload(self): pass
    def close(self): pass
    def update(self, examples, learning_rate, totals=None, version=None, supervised=False):
        if dist.get_rank() == 1 and "life-0" in sys.argv[1]:
            raise MemoryError("17 bytes short")
        dist.all_reduce(torch.zeros(1))
        return Update(1.0, 2.0, {})

if __name__ == "__main__":
    commands.FAILURE_GRACE_S = 2.0
    nothing = lambda *_: None
    ranks.trainer_maker = lambda settings, place, folder: lambda channel: Trainer(
        settings,
        channel,
        Seams(
            check_job=nothing,
            start_engine=Engine,
            fingerprint=lambda job: "light",
            writing=folder.writing,
            remember_job=folder.remember_job,
            remember_budget=folder.remember_budget,
            budget=folder.budget,
            device_fault=nothing,
        ),
        folder.past(),
    )
    ranks.main()
'''
LIGHT_LAUNCHER = """
from services.trainer.__main__ import main
from services.trainer.processes import launcher
from shared.host.processes import run_main
command = launcher.torchrun_command
launcher.torchrun_command = lambda *given: [
    word.replace("services.trainer.processes.ranks", "light_ranks") for word in command(*given)
]
run_main("trainer", main)
"""


@pytest.fixture
def light(tmp_path, monkeypatch) -> str:
    """The module name of a launcher of `LIGHT_RANKS`."""
    (tmp_path / "light_ranks.py").write_text(LIGHT_RANKS)
    (tmp_path / "light_launcher.py").write_text(LIGHT_LAUNCHER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return "light_launcher"


@pytest.mark.parametrize(
    "victim",
    [
        "launcher",
        pytest.param("torchrun", marks=pytest.mark.soak),
        pytest.param("rank 0", marks=pytest.mark.soak),
        pytest.param("rank 1", marks=pytest.mark.soak),  # the test below kills a rank too
    ],
)
def test_a_killed_process_ends_all(tmp_path, light, victim):
    with running(tmp_path / "two", 2, light) as service:
        service.state()
        processes = service.processes()
        chosen = dict(zip(("launcher", "torchrun", "rank 0", "rank 1"), processes, strict=True))[
            victim
        ]
        chosen.kill()
        assert service.process.wait(20) != 0
        assert gone(processes)
        assert list((tmp_path / "two").glob("hone-*")) == []


def test_ranks_of_which_one_failed_come_back_until_they_died_too_often(tmp_path, light):
    with running(tmp_path / "two", 2, light, restarts=1) as service:
        service.load("a", a_job(tmp_path))
        example = Example(
            prompt_token_ids=(1,), token_ids=(2,), old_logprobs=(-1.0,), advantage=1.0
        )
        sentence = "train_step failed on rank 1: MemoryError: 17 bytes short"
        with pytest.raises(
            HoneError,
            match=f"{sentence}; the trainer starts its ranks again, from the newest checkpoint",
        ):
            service.step("a", 1, [example])
        state = service.wait_until_back(1)
        assert (state.job_id, state.step, state.restarts, state.last_failure) == (
            "a",
            0,
            1,
            sentence,
        )
        assert service.step("a", 1, [example]).step == 1
        processes = service.processes()
        processes[2].kill()
        assert service.process.wait(60) != 0
        assert gone(processes)
        assert "rank 0 was killed by SIGKILL" in service.log.read_text().splitlines()[-1]
