"""The batch script for Slurm, with stubs of Slurm's commands."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy" / "slurm" / "hone.sbatch"

STUBS = {
    "sbatch": '#!/bin/bash\nexec bash "$1"\n',
    "scontrol": '#!/bin/bash\n[[ "$*" == "show hostnames nodes" ]] && printf "%s\\n" $NODES\n',
    # notes the step, and runs until it is told to end: by SIGTERM, or by the file that ends it
    "srun": """#!/bin/bash
for word in "$@"; do case "$word" in --nodelist=*) node="${word#--nodelist=}";; esac; done
what="${!###*/}"
{ echo "$@"; env | grep ^HONE_; } >"$STEPS/$node.$what.new"
trap 'echo TERM >"$STEPS/ended.$node.$what"; exit 143' TERM
mv "$STEPS/$node.$what.new" "$STEPS/$node.$what"
while [[ ! -e "$STEPS/end.$what" ]]; do sleep 0.02; done
exit 7
""",
}

STEPS = {
    "n0.redis.conf",
    "n0.services.reward",
    "n0.services.trainer",
    "n0.services.orchestrator",
    "n1.services.rollout",
    "n2.services.rollout",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "steps").mkdir()
    for name, text in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.write_text(text)
        stub.chmod(0o755)
    return tmp_path


def start(folder: Path, nodes: str = "n0 n1 n2") -> subprocess.Popen[str]:
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "STEPS": str(folder / "steps"),
        "NODES": nodes,
        "SLURM_JOB_NODELIST": "nodes",
        "SLURM_CPUS_ON_NODE": "4",
        "HONE_TENSOR_PARALLEL_SIZE": "2",
    }
    command = ["sbatch", str(SCRIPT)]
    return subprocess.Popen(command, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def steps_of(folder: Path) -> set[str]:
    names = {path.name for path in (folder / "steps").iterdir()}
    return {name for name in names if name.startswith("n") and not name.endswith(".new")}


def test_each_service_is_a_step_of_its_node_and_knows_the_others(folder: Path) -> None:
    process = start(folder)
    until(lambda: steps_of(folder) == STEPS)
    step = (folder / "steps" / "n1.services.rollout").read_text().splitlines()
    assert step[0].endswith(f"--nodelist=n1 {folder}/.venv/bin/python -m services.rollout")
    assert "--overlap" in step[0] and "--cpus-per-task=4" in step[0]
    state = folder / ".hone" / "slurm"
    assert {
        "HONE_HOST=0.0.0.0",
        f"HONE_TOKEN_FILE={state}/token",
        f"HONE_RUNS_DIR={folder}/runs",
        "HONE_ORCHESTRATOR_URL=http://n0:8000",
        "HONE_TRAINER_URL=http://n0:8002",
        "HONE_REWARD_URL=http://n0:8003",
        "HONE_ROLLOUT_URL=http://n1:8001,http://n2:8001",
        "HONE_TENSOR_PARALLEL_SIZE=2",
    } == {*step[1:]}
    head = (folder / "steps" / "n0.services.orchestrator").read_text().splitlines()[0]
    assert f"env HONE_REDIS_URL_FILE={state}/redis-url {folder}/.venv/bin/python -m" in head
    password = (state / "redis-password").read_text()
    assert len(password) == len((state / "token").read_text()) == 64
    assert (state / "redis-url").read_text() == f"redis://:{password}@127.0.0.1:6379/0"
    settings = {*(state / "redis.conf").read_text().splitlines()}
    assert {"appendonly yes", "appendfsync always", "maxmemory-policy noeviction"} <= settings
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in state.iterdir())
    assert password not in "".join(
        path.read_text() for path in (folder / "steps").iterdir() if path.is_file()
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    ended = {path.name for path in (folder / "steps").glob("ended.*")}
    assert ended == {f"ended.{name}" for name in STEPS}


def test_a_service_that_ends_ends_the_allocation_and_secrets_stay(folder: Path) -> None:
    process = start(folder)
    until(lambda: steps_of(folder) == STEPS)
    token = (folder / ".hone" / "slurm" / "token").read_text()
    (folder / "steps" / "end.services.trainer").touch()
    assert process.wait(60) == 7
    shutil.rmtree(folder / "steps")
    (folder / "steps").mkdir()
    process = start(folder)
    until(lambda: steps_of(folder) == STEPS)
    assert (folder / ".hone" / "slurm" / "token").read_text() == token
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_single_node_is_refused_with_the_command_for_it(folder: Path) -> None:
    process = start(folder, "n0")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and not steps_of(folder)
    assert (
        said == "got 1 node, expected 2 or more: one node needs no more than 'srun --pty hone up'\n"
    )
