"""What a host lends the sandbox: control groups of both versions, and `hone doctor`'s word on what
is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.reward.sandbox.host import MAX_PROCESSES, Group, Groups
from services.reward.sandbox.local import SHORT_S, LocalSandbox
from shared.wire import ExecuteRequest
from tests.support.reward_helpers import started

ROOT = Path(__file__).parents[3]


def version_2(root: Path, *, holds: str, controllers: str = "cpu memory pids") -> Groups:
    """A tree as the kernel shows one of version 2, with the service in `/own`."""
    own = root / "own"
    own.mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory pids\n")
    for name, content in {
        "cgroup.controllers": controllers,
        "cgroup.procs": holds,
        "cgroup.type": "domain",
    }.items():
        (own / name).write_text(content + "\n")
    membership = root / "membership"
    membership.write_text("0::/own\n")
    return Groups.find(root, membership)


def test_version_2_moves_the_service_aside_and_gives_each_slot_a_group(tmp_path: Path) -> None:
    groups = version_2(tmp_path, holds=str(os.getpid()))
    assert groups.bounded == "whole programs, by cgroups of version 2"
    assert (tmp_path / "own/hone-service/cgroup.procs").read_text() == str(os.getpid())
    assert (tmp_path / "own/cgroup.subtree_control").read_text() == "+memory +pids"
    assert (tmp_path / "own/hone-service/cpu.weight").read_text() == "1000"  # after "+cpu"
    group = groups.make()
    assert group is not None
    folder = group.folders["memory"]
    assert (folder.parent, set(group.folders.values())) == (tmp_path / "own", {folder})
    group.limit_memory(64 << 20)
    written = {file.name: file.read_text() for file in folder.iterdir()}
    assert written == {
        "pids.max": str(MAX_PROCESSES),
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
    }
    assert group.entrances() == [str(folder / "cgroup.procs")]
    assert group.meters() == [str(folder / "cpu.stat"), str(folder / "memory.events")]


@pytest.mark.parametrize(
    ("holds", "controllers", "why"),
    [
        (f"1\n{os.getpid()}", "memory pids", "holds 1 processes beside the service"),
        (
            str(os.getpid()),
            "cpu pids",
            r"has the controllers \['cpu', 'pids'\], and slots need \['memory', 'pids'\]",
        ),
    ],
    ids=["another process", "another controller"],
)
def test_a_group_that_is_not_the_services_own_is_left_alone_and_that_is_said(
    tmp_path: Path, holds: str, controllers: str, why: str
) -> None:
    groups = version_2(tmp_path, holds=holds, controllers=controllers)
    assert groups.make() is None
    assert groups.bounded.startswith("each process alone (")
    assert re.search(why, groups.bounded)
    assert not (tmp_path / "own/hone-service").exists()


def test_version_1_raises_and_lowers_both_limits_in_an_order_that_the_kernel_takes(
    tmp_path: Path,
) -> None:
    for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        (tmp_path / name).write_text("1000")
    group = Group(dict.fromkeys(("memory", "pids", "cpuacct"), tmp_path), 1)
    for size in (2000, 500):
        group.limit_memory(size)
        assert (
            (tmp_path / "memory.limit_in_bytes").read_text()
            == (tmp_path / "memory.memsw.limit_in_bytes").read_text()
            == str(size)
        )


def test_what_a_killed_service_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left, of_another = (
        tmp_path / "own/hone-slot-999999999-0",
        tmp_path / f"own/hone-slot-{os.getpid()}-7",
    )
    left.mkdir(parents=True)
    of_another.mkdir()
    (tmp_path / "own").joinpath("x").touch()
    for folder in (left, of_another):
        assert folder.exists()
    own = tmp_path / "own"
    for name, content in {
        "cgroup.controllers": "memory pids",
        "cgroup.procs": str(os.getpid()),
        "cgroup.type": "domain",
    }.items():
        (own / name).write_text(content)
    (tmp_path / "cgroup.controllers").write_text("memory pids")
    (tmp_path / "membership").write_text("0::/own")
    assert Groups.find(tmp_path, tmp_path / "membership").problem == ""
    assert (left.exists(), of_another.exists()) == (False, True)


def version_1(root: Path, **controllers: str) -> Groups:
    """A tree of version 1: the folder of each controller, of which some may be one."""
    for folder in set(controllers.values()):
        (root / folder).mkdir()
    for name, folder in controllers.items():
        if name != folder:
            (root / name).symlink_to(root / folder)
    lines = (f"{number}:{name}:/" for number, name in enumerate(controllers))
    (root / "membership").write_text("\n".join(lines))
    return Groups.find(root, root / "membership")


def test_version_1_gives_each_slot_its_share_of_the_cores_where_it_can(tmp_path: Path) -> None:
    own = {name: name for name in ("memory", "pids", "cpuacct", "cpu")}
    together = {"memory": "memory", "pids": "pids", "cpuacct": "both", "cpu": "both"}
    for number, (controllers, folders) in enumerate(
        [
            (own, {"memory", "pids", "cpuacct", "cpu"}),
            (together, {"memory", "pids", "cpuacct"}),  # which the cpu's is as well
            ({name: name for name in ("memory", "pids", "cpuacct")}, {"memory", "pids", "cpuacct"}),
        ]
    ):
        root = tmp_path / str(number)
        root.mkdir()
        groups = version_1(root, **controllers)
        assert (groups.problem, set(groups.parents)) == ("", folders)
        group = groups.make()
        assert group is not None and len(group.entrances()) == len(folders)


@pytest.mark.slow
async def test_thirty_processes_leave_another_program_its_share_of_the_cores() -> None:
    if "cpu" not in Groups.find().parents:
        pytest.skip("no shares of the cores can be given here")
    many = """
import os, time
for _ in range(30):
    if not os.fork():
        os.setsid()
        while True: pass
time.sleep(60)
"""
    requests = [
        ExecuteRequest(code=code, cpu_s=60, timeout_s=2 * SHORT_S["timeout_s"])
        for code in (many, "while True: pass")
    ]
    async with started(LocalSandbox(isolated=True, num_slots=3)) as sandbox:
        forks, one = await sandbox.run(requests)
    # It has one core at most, of which two are shared by the 30: a 30th of that before.
    assert one.cpu_s > forks.cpu_s / 10


@pytest.mark.slow
async def test_a_program_and_its_children_share_one_bound_of_memory_and_of_cpu_time() -> None:
    if Groups.find().problem:
        pytest.skip(f"no control groups here: {Groups.find().problem}")
    eaters = """
import os, time
for _ in range(10):
    if os.fork() == 0:
        x = bytearray(60 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(60)
killed = 0
while killed < 6:  # 192 MiB are three times 60
    killed += os.WIFSIGNALED(os.wait()[1])
"""
    async with started(LocalSandbox(isolated=True, num_slots=1)) as sandbox:
        ended = await sandbox.execute(
            ExecuteRequest(code=eaters, expression="killed", memory_mib=64)
        )
        assert (ended.verdict, ended.value) in (
            ("ok", 6),
            ("memory_limit", None),
        )  # the kernel chooses whom it ends
        spinners = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
        ended = await sandbox.execute(ExecuteRequest(code=spinners, cpu_s=1, timeout_s=60))
        assert ended.verdict == "time_limit"
        assert ended.cpu_s >= 1  # of all eight, of which the first had used an eighth
        assert (await sandbox.execute(ExecuteRequest(expression="6 * 7"))).value == 42


async def test_without_control_groups_everything_else_still_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Groups, "make", lambda _: None)
    async with started(LocalSandbox(isolated=True, num_slots=1)) as sandbox:
        assert sandbox.problem() is None
        requests = [
            ExecuteRequest(code="while True: pass", cpu_s=0.3),
            ExecuteRequest(code="x = bytearray(8 << 30)", memory_mib=64),
            ExecuteRequest(
                code="import os\nwhile True:\n try: os.fork()\n except OSError: pass", timeout_s=0.5
            ),
            ExecuteRequest(expression="6 * 7"),
        ]
        ended = await sandbox.run(requests)
    assert [run.verdict for run in ended] == ["time_limit", "memory_limit", "time_limit", "ok"]
    assert 0.3 <= ended[0].cpu_s < 0.6


@pytest.mark.skipif(
    shutil.which("unshare") is None,
    reason="needs util-linux's unshare to make a host without user namespaces",
)
def test_doctor_names_what_the_host_refuses() -> None:
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        forbid,
        "sh",
        sys.executable,
        "-m",
        "hone.cli",
        "doctor",
    ]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    said = " ".join(ended.stdout.split())
    assert (
        "this host cannot isolate model-written code: unshare(user, mount, network, IPC, UTS and "
        "pid namespaces)" in said
    )
    assert "HONE_SANDBOX=unsafe" in said
