"""OpenEnv servers in containers, on the Docker daemon of this machine, by the command `docker`.

A container's labels say whose it is, and its name which attempt of the job has it: a later attempt
finds an earlier one's by the labels and takes it over by a name of its own, so that a superseded
attempt removes nothing of it. What no running job has any more is swept.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase

import aiohttp
import xxhash

from services.orchestrator.environments.environment import Unreachable
from services.orchestrator.tasks import all_of, to_the_end
from shared.errors import BadRequest, HoneError, first_line
from shared.host.logs import get_logger
from shared.job import EnvironmentSpec
from shared.settings import Settings
from shared.wire import TERMINAL, Fenced

PORT = 8000
"""The port on which images of OpenEnv listen."""

NETWORK = "hone-environments"
"""Docker's network of the containers, where the operator names none."""

NETWORK_OPTIONS = (
    *("--opt", "com.docker.network.bridge.enable_ip_masquerade=false"),  # no way out
    *("--opt", "com.docker.network.bridge.enable_icc=false"),  # nor to one another
)

MAX_PROCESSES = 512
"""Processes and threads of a container."""

OWNER, JOB, REPLICA, MADE_OF, UNTIL = (
    f"hone.{name}" for name in ("owner", "job", "replica", "made_of", "until")
)
"""Labels of a container: the identity of the jobs' Redis, the job, the number of the replica, and a
digest of what it was made of. A container that only tries an image has the time in its place after
which no one needs it."""

COMMAND_S = 120.0
"""Seconds that a command of Docker has."""

ANSWER_S = 2.0
"""Seconds that a container has to say that it is healthy."""

LOOK_S = 0.3
"""Seconds between two requests whether a container that starts is healthy."""

INSPECT_S = 3.0
"""Seconds between two questions to Docker whether it still runs; each is a process."""

MAX_STARTING = 4
"""Containers of a job that start at a time."""

TRIAL_S = 120.0
"""Seconds that trying a job's image may take when the job is submitted, whatever its `boot_s`."""

SWEEP_S = 60.0
"""Seconds between two sweeps."""

LOG_CHARS = 400
"""Most characters of a container's log in a sentence."""


class Containers:
    """The replicas of a job's environment. Without `identity` there is one, to try the image when
    the job is submitted."""

    def __init__(
        self, spec: EnvironmentSpec, settings: Settings, who: Fenced, identity: str | None
    ) -> None:
        self._spec = spec
        self._image = spec.image or ""
        self._settings = settings
        self._identity = identity
        self._num = spec.replicas if identity else 1
        self._job = who.job_id if identity else f"trial-{uuid.uuid4().hex}"
        self._attempt = who.attempt
        self._prefix = f"hone-{self._job}-{self._attempt}-"
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(MAX_STARTING)
        self._urls: tuple[str, ...] = ()

    async def start(self, http: aiohttp.ClientSession) -> tuple[str, ...]:
        """Returns the URLs of the replicas, all of which are healthy. Raises BadRequest for an
        image that is not allowed or not there, and Unreachable."""
        async with self._starting:
            if not self._urls:
                check_image_allowed(self._image, self._settings)
                await self._check_image_there()
                await self._make_network()
                self._urls = tuple(
                    await all_of(self.up(number, http) for number in range(self._num))
                )
            return self._urls

    async def up(self, number: int, http: aiohttp.ClientSession, *, restarted: bool = False) -> str:
        """Returns the URL of a replica once it is healthy: its container is made, or started again
        if it ended, or `restarted` even if it runs. Raises Unreachable if it is not healthy within
        `boot_s`, and removes it; also if a newer attempt of the job has a container of the
        replica."""
        async with self._turns:
            return await self._up(number, http, "restart" if restarted else "start")

    async def _up(self, number: int, http: aiohttp.ClientSession, command: str) -> str:
        name, limit_s = f"{self._prefix}{number}", self._spec.boot_s
        try:
            async with asyncio.timeout(limit_s):
                if not await self._take_over(number, name, command):
                    await docker("run", *self._run(number, name))
                return await self._until_healthy(name, http)
        except TimeoutError:
            why = f"did not answer GET /health on port {PORT} within {limit_s:g} s (boot_s)"
        except _Ended as error:
            why = str(error)
        said = await _log_of(name)
        with contextlib.suppress(DockerFailed):  # it may not have been made
            await _remove([name])  # the next try makes another one
        raise Unreachable(f"the container of environment.image {self._image!r} {why}{said}")

    async def _until_healthy(self, name: str, http: aiohttp.ClientSession) -> str:
        """Returns the URL of the container's server. Raises _Ended."""
        url, inspected_at = None, -math.inf
        while not (url and await _is_healthy(http, url)):
            if time.monotonic() - inspected_at >= INSPECT_S:
                await self._check_runs(name)
                inspected_at = time.monotonic()
                url = url or await _url_of(name)
            else:
                await asyncio.sleep(LOOK_S)
        return url

    async def remove(self) -> None:
        """Removes the containers that this attempt has. What Docker does not remove now is swept
        later."""
        try:
            filters = (f"label={JOB}={self._job}", f"name=^/?{self._prefix}")
            await _remove([name for _, name in await _listed(*filters)])
        except HoneError as error:
            get_logger().warning("containers not removed", job=self._job, reason=error.detail)

    async def _check_image_there(self) -> None:
        try:
            await docker("version")
            await docker("image", "inspect", "--format", "{{.Id}}", self._image)
        except DockerFailed as error:
            if error.words[0] == "image":
                raise BadRequest(
                    f"environment.image is {self._image!r}, which Docker does not have here; "
                    f"expected one of `docker images`: `docker pull {self._image}` on the "
                    "orchestrator's machine"
                ) from error
            raise Unreachable(
                f"environment.image is {self._image!r}, and no Docker daemon answers the "
                f"orchestrator: {error.detail}; expected one on its machine, or environment.url"
            ) from error

    async def _make_network(self) -> None:
        if self._settings.environment_network:
            return
        with contextlib.suppress(DockerFailed):  # there is one: else `docker run` says so
            await docker("network", "create", *NETWORK_OPTIONS, NETWORK)

    async def _take_over(self, number: int, name: str, command: str) -> bool:
        """Returns whether there was a container of the replica, which has the name now and runs.
        All others are removed: made of something else, or such that Docker cannot start. They are
        called by name: one that a newer attempt took over meanwhile has another name. Raises
        Unreachable if one has been taken over already."""
        filters = (f"label={JOB}={self._job}", f"label={REPLICA}={number}")
        every = await _listed(*filters, labels=(MADE_OF,))
        if any(_attempt_of(found) > self._attempt for _, found, _ in every):
            raise Unreachable(f"a newer attempt than {self._attempt} has the job's containers")
        is_there = False
        for _, found, made_of in every:
            if is_there or made_of != self._made_of:
                await _remove([found])
            else:
                is_there = await _started(found, name, command)
        return is_there

    def _run(self, number: int, name: str) -> tuple[str, ...]:
        until = time.time() + TRIAL_S + COMMAND_S
        labels = {
            OWNER: self._identity or "",
            UNTIL: "" if self._identity else f"{until:.0f}",
            JOB: self._job,
            REPLICA: str(number),
            MADE_OF: self._made_of,
        }  # all of them: an image may have labels of its own
        labelled = [word for label in labels.items() for word in ("--label", "=".join(label))]
        return ("--detach", "--name", name, *labelled, *self._how)

    @property
    def _made_of(self) -> str:
        return xxhash.xxh64_hexdigest("\0".join(self._how).encode())

    @property
    def _how(self) -> tuple[str, ...]:
        settings, memory = self._settings, f"{self._settings.environment_memory_mib}m"
        given = [
            word
            for name, value in sorted(self._spec.variables.items())
            for word in ("--env", f"{name}={value}")
        ]
        return (
            *("--pull", "never", "--network", settings.environment_network or NETWORK),
            *("--publish", f"127.0.0.1::{PORT}"),
            *("--memory", memory, "--memory-swap", memory),
            *("--cpus", f"{settings.environment_cpus:g}", "--pids-limit", str(MAX_PROCESSES)),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--log-driver", "json-file", "--log-opt", "max-size=10m"),
            *given,
            self._image,
        )

    async def _check_runs(self, name: str) -> None:
        state = "{{.State.Running}} {{.State.OOMKilled}} {{.State.ExitCode}}"
        running, out_of_memory, code = (await docker("inspect", "--format", state, name)).split()
        if running == "true":
            return
        limit = f"was killed for more than {self._settings.environment_memory_mib} MiB of memory"
        how = limit if out_of_memory == "true" else f"ended with code {code}"
        raise _Ended(f"{how} before it answered GET /health on port {PORT}")


class _Ended(Exception):
    """The container ended before it was healthy."""


def check_image_allowed(image: str, settings: Settings) -> None:
    """Raises BadRequest unless a pattern of HONE_ALLOWED_ENVIRONMENT_IMAGES fits the image."""
    allowed = settings.allowed_environment_images
    if not any(fnmatchcase(image, pattern) for pattern in allowed):
        raise BadRequest(
            f"environment.image is {image!r:.200}, which the orchestrator's Docker may not run for "
            "jobs; expected an image that fits HONE_ALLOWED_ENVIRONMENT_IMAGES "
            f"({', '.join(allowed) or 'not set, so none'})"
        )


async def keep_swept(
    identity: Callable[[], str | None],
    status: Callable[[str], Awaitable[str | None]],
    settings: Settings,
) -> None:
    """Removes, again and again, the containers that no running or waiting job has, because an
    orchestrator died, or Docker was away when the job ended. If jobs may name no images, it ends
    once there are no containers. `identity` is the jobs' Redis's, and `status` tells a job's, None
    for none."""
    may_come, told = bool(settings.allowed_environment_images), ""
    while may_come or shutil.which("docker"):
        try:
            if not await sweep(identity(), status) and not may_come:
                return
        except Exception as error:  # whatever it was, later sweeps may do better
            if (why := first_line(error)) != told:
                get_logger().warning("containers not swept", reason=why)
            told = why
        await asyncio.sleep(SWEEP_S)


async def sweep(identity: str | None, status: Callable[[str], Awaitable[str | None]]) -> int:
    """Removes such containers once; the containers of other Redises stay, and what Docker does not
    remove. Returns how many containers there were, of all owners. Raises DockerFailed where
    Docker lists none, and the errors of `status`."""
    found = await _listed(f"label={JOB}", "name=^/?hone-", labels=(OWNER, JOB, UNTIL))
    for id, name, owner, job, until in found:
        if until.isdecimal():
            is_left = int(until) < time.time()
        else:
            is_left = owner == identity and await status(job) in {None, "paused", *TERMINAL}
        if not is_left:
            continue
        try:
            await _remove([id])
            get_logger().info("container swept", container=name, job=job)
        except DockerFailed as error:
            get_logger().warning("container not swept", container=name, reason=error.detail)
    return len(found)


class DockerFailed(Unreachable):
    """A command of Docker failed; `words` are its own."""

    def __init__(self, words: tuple[str, ...], why: str) -> None:
        super().__init__(f"'docker {words[0]}' says {why!r:.500}")
        self.words = words


async def docker(*words: str) -> str:
    """Returns what the command printed. Raises DockerFailed if it failed, or was late."""
    out, err, code = await _ran(words)
    if code:
        raise DockerFailed(words, _reason(err) or f"exit code {code}")
    return out


def _reason(err: str) -> str:
    """Returns the daemon's answer among what `docker` said, which may end with a hint on its use;
    or else all of it."""
    lines = err.splitlines()
    return next((line for line in lines if "Error response from daemon" in line), " | ".join(lines))


async def _ran(words: tuple[str, ...]) -> tuple[str, str, int | None]:
    """Returns stdout, stderr and exit code of the command. Raises DockerFailed."""
    pipe = asyncio.subprocess.PIPE
    try:
        running = await asyncio.create_subprocess_exec(
            "docker", *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        raise DockerFailed(words, str(error)) from error
    try:
        async with asyncio.timeout(COMMAND_S):
            said = await running.communicate()
    except TimeoutError as error:
        raise DockerFailed(words, f"nothing within {COMMAND_S:g} s") from error
    finally:
        if running.returncode is None:
            running.kill()
            await to_the_end(running.wait())
    out, err = (each.decode(errors="replace").strip() for each in said)
    return out, err, running.returncode


async def _listed(*filters: str, labels: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns id, name and labels of each container that the filters leave."""
    asked = [word for each in filters for word in ("--filter", each)]
    shown = ["{{.ID}}", "{{.Names}}", *(f'{{{{.Label "{label}"}}}}' for label in labels)]
    words = ("ps", "--all", "--no-trunc", *asked, "--format", "|".join(shown))
    return [tuple(line.split("|")) for line in (await docker(*words)).splitlines()]


def _attempt_of(name: str) -> int:
    """Returns the attempt that has the container. A label could not change when it is taken
    over."""
    *_, attempt, _ = ("0", *name.split("-"))
    return int(attempt) if attempt.isdecimal() else 0


async def _started(found: str, name: str, command: str) -> bool:
    """Returns whether the container `found` has the name now and runs, by `command`; else it is
    removed."""
    now = found
    try:
        if now != name:
            await docker("rename", now, name)
            now = name
        await docker(command, now)
    except DockerFailed as error:
        get_logger().warning("container not started again", container=now, reason=error.detail)
        await _remove([now])
        return False
    return True


async def _remove(ids: list[str]) -> None:
    if ids:
        await docker("rm", "--force", "--volumes", *ids)


async def _url_of(name: str) -> str | None:
    """Returns the URL of the container's server; None once it has ended and has no port."""
    try:
        return f"http://{(await docker('port', name, f'{PORT}/tcp')).splitlines()[0]}"
    except (DockerFailed, IndexError):
        return None


async def _is_healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health", timeout=aiohttp.ClientTimeout(ANSWER_S)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError):
        return False


async def _log_of(name: str) -> str:
    """Returns the end of the container's log, as the end of a sentence."""
    out, err, _ = await _ran(("logs", "--tail", "5", name))
    said = " | ".join(f"{out}\n{err}".strip().splitlines())
    return f"; its log ends with {said[-LOG_CHARS:]!r}" if said else ""
