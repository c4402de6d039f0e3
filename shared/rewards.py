"""The base class of a job's own reward, `hone.Reward`, and its tools. Standard library only,
because the sandbox imports this file too.

    class Runs(hone.Reward):
        def score_batch(self, prompts, completions, calls, results, **columns):
            pairs = zip(completions, calls)
            programs = [{"code": completion, "expression": call} for completion, call in pairs]
            runs = self.execute_batch_in_sandbox(programs)
            return [float(run.value == result) for run, result in zip(runs, results)]

`call` is for example "square(3)". Its value is compared here, as plain data: inside the sandbox the
program could redefine `==`.

See docs/rewards.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a program or function ended. `verdict` "ok": it ran to its end, and `value` is its
    result, as plain data.

    Else "runtime_error", "time_limit", "memory_limit", "output_limit", or "sandbox_error", which
    says nothing about the program. `stderr` ends with the reason.
    """

    verdict: str
    value: Any = None
    stdout: str = ""
    stderr: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.verdict == "ok"


@dataclass(frozen=True)
class SandboxConfig:
    """Where and how long a Reward's programs run. `packages` are names of installed packages that
    they may import: a Trainer that starts the stack asks for them, elsewhere HONE_SANDBOX_PACKAGES
    names them. Limits are each program's."""

    packages: tuple[str, ...] = ()
    timeout_s: float = 30.0
    cpu_s: float = 4.0
    memory_mib: int = 512

    def __post_init__(self) -> None:
        if isinstance(self.packages, str):
            raise ValueError(
                f"packages is {self.packages!r}; expected names, as ({self.packages!r},)"
            )
        _check_positive(self.limits())

    def limits(self) -> dict[str, Any]:
        return {"timeout_s": self.timeout_s, "cpu_s": self.cpu_s, "memory_mib": self.memory_mib}


@dataclass(frozen=True)
class FunctionConfig:
    """How a Reward's functions run: see `Reward.execute_in_function`."""

    timeout_s: float = TIMEOUT_S
    isolated: bool = True

    def __post_init__(self) -> None:
        _check_positive({"timeout_s": self.timeout_s})


def _check_positive(limits: Mapping[str, Any]) -> None:
    for name, value in limits.items():
        if not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name} is {value!r}; expected a number above 0")


class Tools(Protocol):
    """Runs programs and functions for a Reward, for example in the reward service's worker."""

    def in_sandbox(self, programs: Sequence[Mapping[str, Any]]) -> list[Outcome]: ...

    def in_function(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        *,
        isolated: bool,
        timeout_s: float,
    ) -> list[Outcome]: ...


class Reward:
    """Base class of a job's own reward. Define one of these, plain or async; columns of the dataset
    come by name:

        def score(self, prompt, completion, **columns)
        def score_batch(self, prompts, completions, **columns)

    `score` returns a number, None (not applicable) or (number, why); `score_batch` a list of these,
    one per completion.

    One instance is made without arguments when the job's code is loaded, and kept. The tools below
    may be called from any thread, and block until they are done.
    """

    tools: ClassVar[Tools | None] = None
    sandbox: SandboxConfig = SandboxConfig()
    function: FunctionConfig = FunctionConfig()

    def __init__(
        self, sandbox: SandboxConfig | None = None, function: FunctionConfig | None = None
    ) -> None:
        """Defaults for all calls of the tools; None leaves the class's own."""
        if sandbox is not None:
            self.sandbox = sandbox
        if function is not None:
            self.function = function

    def execute_in_sandbox(self, code: str = "", **options: Any) -> Outcome:
        """Returns how `code`, which a model wrote, ended in a sandbox of its own.

        Options: `expression`, evaluated after it for the outcome's `value`; `inputs`, bound as
        globals first; `stdin`; limits `cpu_s` (4), `timeout_s` (30, wall clock) and `memory_mib`
        (512). Raises ValueError for any other option.
        """
        return self.execute_batch_in_sandbox([{"code": code, **options}])[0]

    def execute_batch_in_sandbox(self, programs: Iterable[Mapping[str, Any]]) -> list[Outcome]:
        """Returns one outcome per program; as many run at once as the service has sandboxes. A
        program is a dict of `code` and the options of `execute_in_sandbox`."""
        limits = self.sandbox.limits()
        return self._tools().in_sandbox([{**limits, **program} for program in programs])

    def execute_in_function(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        isolated: bool | None = None,
        timeout_s: float | None = None,
    ) -> Outcome:
        """Returns the outcome of `function`, your own code, for `arguments`; it is ended after
        `timeout_s`.

        `isolated` runs it in a fresh copy of this process, which leaves nothing behind. Otherwise
        it runs in a process that is kept warm from call to call: then `function` must be defined at
        the top level of your file, and `arguments` must be plain data. The value is plain data
        either way.
        """
        return self.execute_batch_in_function(
            function, [arguments], isolated=isolated, timeout_s=timeout_s
        )[0]

    def execute_batch_in_function(
        self,
        function: Callable[..., Any],
        arguments: Iterable[tuple[Any, ...]],
        *,
        isolated: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Returns one outcome for each tuple of arguments; as many run at once as there are
        processors. `timeout_s` is for each. None is what `function` of the instance says."""
        return self._tools().in_function(
            function,
            list(arguments),
            isolated=self.function.isolated if isolated is None else isolated,
            timeout_s=self.function.timeout_s if timeout_s is None else timeout_s,
        )

    def _tools(self) -> Tools:
        if Reward.tools is None:
            raise RuntimeError(
                "a Reward's tools work in the reward service only; `hone grade --file` tries it "
                "there on one line"
            )
        return Reward.tools


RewardEnvironment = Reward
"""Another name of the base class."""
