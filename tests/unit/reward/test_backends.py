"""Which sandbox the settings ask for, packages for graded code, and Modal's behind the same
interface.

No Modal account here: its client is a stand-in with the same names, which runs the container's
command as a local process.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.reward.app import sandbox_of
from services.reward.sandbox import host as packages
from services.reward.sandbox import on_modal
from services.reward.sandbox.local import LocalSandbox
from services.reward.sandbox.on_modal import ModalSandbox
from shared.errors import BadRequest, Failed
from shared.settings import Settings, load_settings
from shared.wire import ExecuteRequest, Execution
from tests.support.reward_helpers import started

ROOT = Path(__file__).parents[3]


def test_the_setting_names_the_backend() -> None:
    assert type(sandbox_of(Settings(sandbox="modal"))) is ModalSandbox
    for name in ("auto", "local", "unsafe"):
        assert type(sandbox_of(Settings(sandbox=name))) is LocalSandbox


def test_packages_are_one_text_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_SANDBOX_PACKAGES", "numpy, sympy")
    assert load_settings().sandbox_packages == ("numpy", "sympy")


def test_a_package_that_is_not_installed_is_named_with_the_nearest_one() -> None:
    with pytest.raises(
        BadRequest, match=r"names 'nunpy', which is not installed .*did you mean 'numpy'\?"
    ):
        sandbox_of(Settings(sandbox_packages=("nunpy",)))


def test_a_package_brings_what_it_requires_and_nothing_else() -> None:
    found = packages.find(("sympy",))
    assert found.modules == ("sympy",)
    tops = {Path(inside).name.partition("-")[0] for inside in found.binds.values()}
    assert tops == {"sympy", "mpmath", "isympy.py"}


@pytest.mark.parametrize("kind", ["local", "unsafe"])
async def test_graded_code_imports_the_packages_of_the_setting(kind: Any) -> None:
    settings = Settings(sandbox=kind, sandbox_slots=1, sandbox_packages=("numpy", "mpmath"))
    code = "import sys\nwarm = 'numpy' in sys.modules\nimport numpy, mpmath"
    value = "[warm, int(numpy.arange(5).sum()), str(mpmath.mpf(2))]"
    async with started(sandbox_of(settings)) as sandbox:
        ended = await sandbox.execute(ExecuteRequest(code=code, expression=value))
        other = await sandbox.execute(ExecuteRequest(code="import pydantic"))
    assert (ended.verdict, ended.value) == ("ok", [True, 10, "2.0"])
    assert other.verdict == ("runtime_error" if kind == "local" else "ok")


async def test_a_package_that_does_not_work_inside_is_named_before_anything_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module")
    broken = packages.Packages(
        {str(tmp_path / "broken.py"): f"{packages.INSIDE}/broken.py"}, ("broken",)
    )
    sandbox = LocalSandbox(isolated=True, num_slots=1, packages=broken)
    await sandbox.start()
    assert (
        sandbox.problem()
        == "a package of HONE_SANDBOX_PACKAGES does not work in the sandbox: No module "
        "named 'no_such_module'"
    )
    with pytest.raises(Failed, match="no_such_module"):
        await sandbox.execute(ExecuteRequest(code="1"))


class _Aio:
    """A function with `.aio`, as Modal's client has them."""

    def __init__(self, function: Any) -> None:
        self.aio = function


class _Container:
    """Runs the command of a Modal Sandbox as a process here; what is written to it goes to the
    process at the end."""

    def __init__(
        self, modal: types.SimpleNamespace, command: tuple[str, ...], options: dict[str, Any]
    ) -> None:
        boot = command[-1].replace("'/hone'", repr(str(ROOT)))
        self._process = subprocess.Popen(
            [sys.executable, *command[1:-1], boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._modal, self._written, self.options = modal, b"", options
        self.stdin = types.SimpleNamespace(
            write=self._write, write_eof=self._eof, drain=_Aio(self._drain)
        )
        self.terminate = _Aio(self._terminate)
        self.terminated = False

    def _write(self, data: bytes) -> None:
        assert len(data) <= 2 << 20, "Modal's client refuses more than 2 MiB at once"
        self._written += data

    def _eof(self) -> None:
        assert self._process.stdin
        self._process.stdin.write(self._written.decode())
        self._process.stdin.close()

    async def _drain(self) -> None: ...

    @property
    async def stdout(self) -> AsyncIterator[str]:
        assert self._process.stdout
        while line := await asyncio.to_thread(self._process.stdout.readline):
            yield self._modal.rewrite(line)

    async def _terminate(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        assert self._process.stdout
        self._process.stdout.close()
        self.terminated = True


@pytest.fixture
def modal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """The stand-in; `asked` are the images and containers made, `rewrite` changes what comes
    back."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a container's own goes with it
    fake = types.SimpleNamespace(asked=[], containers=[], rewrite=lambda line: line, refusals=[])

    class Image:
        def __init__(self, *made: Any) -> None:
            self.made = made

        def pip_install(self, *names: str) -> Image:
            return Image(*self.made, ("pip", names))

        def add_local_dir(self, local: Any, remote: str) -> Image:
            assert (Path(local) / "alone.py").exists()
            return Image(*self.made, ("dir", remote))

    async def create(*command: str, **options: Any) -> _Container:
        if fake.refusals:
            raise fake.refusals.pop()
        fake.containers.append(_Container(fake, command, options))
        return fake.containers[-1]

    async def lookup(name: str, *, create_if_missing: bool) -> str:
        assert create_if_missing
        return name

    fake.Image = types.SimpleNamespace(
        debian_slim=lambda python_version: Image(("debian", python_version)),
    )
    fake.App = types.SimpleNamespace(lookup=_Aio(lookup))
    fake.Sandbox = types.SimpleNamespace(create=_Aio(create))
    fake.exception = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "modal", fake)
    # The network of this machine is not blocked.
    monkeypatch.setattr(ModalSandbox, "self_test", on_modal.PROBES[:1])
    return fake


async def on_modal_with(**settings: Any) -> ModalSandbox:
    sandbox = sandbox_of(Settings(sandbox="modal", **settings))
    assert isinstance(sandbox, ModalSandbox)
    await sandbox.start()
    return sandbox


async def test_modal_runs_each_program_in_a_container_of_its_own_with_the_network_blocked(
    modal: types.SimpleNamespace,
) -> None:
    sandbox = await on_modal_with(sandbox_packages=("numpy",))
    assert sandbox.problem() is None
    requests = [
        ExecuteRequest(
            code="print(input())\nx = 6 * y", expression="x", inputs={"y": 7}, stdin="told\n"
        ),
        ExecuteRequest(code="1/0"),
        ExecuteRequest(code="import time; time.sleep(60)", timeout_s=0.3),
        ExecuteRequest(code="while True: pass", cpu_s=1),
        ExecuteRequest(code="x = bytearray(1 << 30)"),
        ExecuteRequest(code="while True: print('x' * 100_000)"),
        ExecuteRequest(code="import os; os._exit(0)", expression="1"),
    ]
    ended = await sandbox.run(requests)
    assert [run.verdict for run in ended] == [
        "ok", "runtime_error", "time_limit", "time_limit", "memory_limit", "output_limit",
        "runtime_error",
    ]  # fmt: skip
    assert (ended[0].value, ended[0].stdout) == (42, "told\n")
    assert len(modal.containers) == 1 + len(requests)
    assert all(container.terminated for container in modal.containers)
    options = modal.containers[1].options
    assert (options["block_network"], options["app"], options["memory"][1] > 512) == (
        True,
        "hone-sandbox",
        True,
    )
    assert options["image"].made == (
        ("debian", "3.11"),
        ("pip", ("numpy",)),
        ("dir", "/hone/services/reward/sandbox/inside"),
    )  # fmt: skip


async def test_modals_own_failure_is_retried_and_then_a_sandbox_error(
    modal: types.SimpleNamespace,
) -> None:
    sandbox = await on_modal_with()
    modal.refusals = [modal.exception.Error("no capacity")]
    assert (await sandbox.execute(ExecuteRequest(expression="6 * 7"))).value == 42
    modal.refusals = [modal.exception.Error("no capacity")] * 2
    ended = await sandbox.execute(ExecuteRequest(expression="6 * 7"))
    assert (ended.verdict, ended.stderr) == ("sandbox_error", "Modal failed twice: no capacity")


FACTS = {
    "exit": 0,
    "limit": None,
    "cpu_s": 0.1,
    "overflow": False,
    "stdout": "a",
    "stderr": "",
    "result": '{"end": "ok", "value": 5}',
}
"""What a container tells of its program's end."""


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ("", "time_limit"),
        ("garbage\n", "runtime_error"),
        ("[]\n", "runtime_error"),
        ('{"exit": 0}\n', "runtime_error"),
        (json.dumps(FACTS | {"limit": "x"}), "runtime_error"),
    ],
)
async def test_what_a_program_does_to_its_own_answer_is_its_failure(
    modal: types.SimpleNamespace, told: str, verdict: str
) -> None:
    sandbox = await on_modal_with()
    modal.rewrite = lambda line: line if line == "began\n" else told
    assert (await sandbox.execute(ExecuteRequest(expression="1"))).verdict == verdict


async def test_a_container_that_never_begins_is_modals_failure(
    modal: types.SimpleNamespace,
) -> None:
    sandbox = await on_modal_with()
    modal.rewrite = lambda _: "Traceback"
    ended = await sandbox.execute(ExecuteRequest(expression="1"))
    assert ended.verdict == "sandbox_error"
    assert "before the program began" in ended.stderr


async def test_a_container_lost_after_the_program_began_is_the_programs_failure(
    modal: types.SimpleNamespace,
) -> None:
    def lost(line: str) -> str:
        if line != "began\n":
            raise modal.exception.Error("the container ran out of memory")
        return line

    sandbox = await on_modal_with()
    modal.rewrite = lost
    ended = await sandbox.execute(ExecuteRequest(expression="1"))
    assert (ended.verdict, len(modal.containers)) == ("runtime_error", 3)
    assert ended.stderr.endswith("the container was lost: the container ran out of memory")


async def test_without_the_client_or_an_account_it_says_what_to_do(
    modal: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lookup(*_: Any, **__: Any) -> None:
        raise modal.exception.Error("Token missing")

    modal.App.lookup = _Aio(lookup)
    assert "Modal refuses the credentials: Token missing; run `modal token new`" in str(
        (await on_modal_with()).problem()
    )
    monkeypatch.setitem(sys.modules, "modal", None)
    sandbox = await on_modal_with()
    problem = sandbox.problem() or ""
    assert problem.startswith("HONE_SANDBOX=modal needs the Modal client: `make setup` in Hone's")
    assert "`pip install 'hone-rl[modal]'` into" in problem
    with pytest.raises(Failed, match="needs the Modal client"):
        await sandbox.execute(ExecuteRequest(code="1"))
    with pytest.raises(Failed, match="HONE_SANDBOX=local"):
        await sandbox.open_worker("any.module")


def test_an_execution_is_the_same_kind_of_thing_on_every_backend() -> None:
    ended = on_modal.execution_of(["began", json.dumps(FACTS)], ExecuteRequest(expression="5"), 1.5)
    assert ended == Execution(verdict="ok", value=5, stdout="a", wall_s=1.5, cpu_s=0.1)
