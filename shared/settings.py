"""All settings: where the services run, and secrets. They are never sent over the API.

Each process's entry point reads them from the environment (`HONE_*`), never at import. An unknown
`HONE_*` variable is an error that names the nearest setting, so a misspelt setting is not silently
ignored. A secret may be in a file instead, as in containers: `HONE_TOKEN_FILE` names the file that
holds `HONE_TOKEN`.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import unquote

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shared.documented import Documented
from shared.errors import BadRequest
from shared.explain import closest, sentences
from shared.http.urls import (
    PORTS,
    check_samplers,
    check_service_url,
    check_trainers,
    check_url,
    is_loopback,
    sampler_places,
    trainer_urls,
)

PREFIX = "HONE_"

MAX_KEY_JOBS = 256
"""The default of HONE_MAX_KEY_JOBS."""

MAX_PLACES = 16
"""The most jobs that share a trainer."""

OTEL_KINDS = ("", "TRACES_")
"""OpenTelemetry's variables for all that it exports, and for traces alone."""


def split(text: str) -> tuple[str, ...]:
    """Returns the parts of a text between its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _listed(value: Any) -> Any:
    return split(value) if isinstance(value, str) else value


Listed = BeforeValidator(_listed)
"""Validator for a setting with several values, which are one text in the environment:
"numpy,sympy"."""


class Settings(Documented):
    """Every setting of every service, by the service that reads it. In the environment a setting is
    `HONE_` and its name in capitals; a value given by keyword takes precedence. The text under a
    setting is its documentation, which `hone explain` shows."""

    # pydantic-settings is not used because its import takes a fifth of the time of `hone ls`
    model_config = ConfigDict(
        extra="ignore", frozen=True, allow_inf_nan=False, validate_default=True
    )

    # every service: how it listens and logs, the folders that all share

    host: str = "127.0.0.1"
    """Address to listen on. The default is this machine only; another address needs `token`."""

    token: SecretStr | None = None
    """Bearer token: every request but `/healthz`, `/readyz`, `/version` and the sampler's `/health`
    must carry it, and services and `hone` send it. At least 8 visible ASCII characters: it goes
    into a header, and must not be guessed. None: no authentication, and loopback only. This and the
    other secrets (`redis_url`, `judge_api_key`, `teacher_api_key`, `modal_key`, `modal_secret`) may
    be in a file instead, which HONE_TOKEN_FILE names for this one."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""

    log_format: Literal["json", "console"] = "json"
    """"json": one object per line, for machines; "console": for people."""

    max_body_mib: int = Field(default=1024, gt=0)
    """Largest request body, in MiB. A step's batch is one body, 9 bytes per token."""

    operation_deadline_s: float = Field(default=3600.0, ge=300)
    """Seconds that one call of a job to a service may take, but for sampling: training on a batch,
    or loading a model, its download included. Grading a group, publishing or loading weights and
    writing a checkpoint have a sixth of it, at least 300. The orchestrator then gives the call up,
    and a service its work on any request. Raise it for models that need longer, on orchestrator and
    services alike."""

    runs_dir: Path = Path("runs")
    """Where jobs leave their results, one folder per job. Orchestrator, trainer and sampler share
    it."""

    runs_commit: str | None = None
    """Command that makes files written to `runs_dir` durable and visible to other hosts, for
    volumes that do not do so by themselves. It runs after each checkpoint and after weights were
    published there (`weight_sync = "disk"`), on each node of a trainer that writes its part of a
    checkpoint. None: the volume needs none."""

    runs_refresh: str | None = None
    """Command that shows this host the files that others wrote to `runs_dir`. It runs before such
    weights are read, when an uploaded file is missing, and on the nodes of a trainer before they
    read or write a checkpoint together. None: the volume needs none."""

    data_dirs: Annotated[tuple[Path, ...] | None, Listed] = None
    """Folders whose data files jobs may name, with commas between several. None: any file that the
    orchestrator can read while it listens on this machine only, and none otherwise, or if an API
    key submits the job; a file that is not allowed can be uploaded."""

    model_dirs: Annotated[tuple[Path, ...] | None, Listed] = None
    """Folders whose model folders jobs may name, with commas between several. Folders below
    `runs_dir`, such as checkpoints, are always allowed. None: any folder while the orchestrator
    listens on this machine only, and no other otherwise, or if an API key asks. A name that is no
    folder is a Hugging Face id."""

    max_files_gib: float = Field(default=100.0, gt=0)
    """GiB that all uploaded files may take together, so that they leave some of the disk for jobs.
    Beyond it uploads are refused until some are removed. The default is OpenAI's for an
    organization."""

    allowed_environments: Annotated[tuple[str, ...] | None, Listed] = None
    """Hosts whose environments and tools jobs may name (`environment.url`, `environment.mcp`), as
    "games" or "games:8100", with commas between several: the orchestrator connects to them. None:
    this machine while the orchestrator listens on this machine only and no API key submits the job,
    and no host otherwise."""

    teacher_url: str | None = None
    """OpenAI-compatible endpoint of the teachers of jobs with `[teacher]`, as in
    http://host:8000/v1. It has to give log-probs of a prompt's tokens, as vLLM does, and a sampler
    of Hone. None: such jobs are refused."""

    teacher_api_key: SecretStr | None = None
    """API key of the teachers' endpoint."""

    # where each service is, and its port

    orchestrator_url: str = f"http://127.0.0.1:{PORTS['orchestrator']}"
    """Where `hone` finds the orchestrator. Not set: the stack that `hone up` started, if one
    runs."""

    trainer_url: str = f"http://127.0.0.1:{PORTS['trainer']}"
    """Where the orchestrator finds the trainer; a trainer of several nodes is at node 0. A sampler
    uses it for `weight_sync` "http", "delta", and "lora" on another machine. The orchestrator takes
    several trainers, with semicolons between them, each with samplers of its own (`rollout_url`):
    so many jobs run at once. Orchestrators that share Redis and a trainer on another machine must
    use the same host name for it, because a job's lease is on the host and port of its trainer and
    its samplers."""

    rollout_url: str = f"http://127.0.0.1:{PORTS['rollout']}"
    """Where the orchestrator finds the samplers, with commas between several places: a URL, or
    "registered", which is every sampler that has `rollout_advertise_url`. Several trainers have
    samplers each, in the order of `trainer_url`, with semicolons between them:
    "http://a:8001,http://b:8001;http://c:8001"."""

    reward_url: str = f"http://127.0.0.1:{PORTS['reward']}"
    """Where the orchestrator and `hone grade` find the reward service."""

    orchestrator_port: int = Field(default=PORTS["orchestrator"], ge=0, le=65535)
    """Port that the orchestrator listens on."""

    rollout_port: int = Field(default=PORTS["rollout"], ge=0, le=65535)
    """Port that the sampler listens on."""

    trainer_port: int = Field(default=PORTS["trainer"], ge=0, le=65535)
    """Port that the trainer listens on."""

    reward_port: int = Field(default=PORTS["reward"], ge=0, le=65535)
    """Port that the reward service listens on."""

    # the orchestrator: Redis, leases, deadlines, prices

    redis_url: SecretStr | None = None
    """Redis, for example redis://:password@host:6379/0. It must have `appendonly yes`, `appendfsync
    always` and `maxmemory-policy noeviction`. None: only `hone up` works, which starts one."""

    redis_dir: Path | None = None
    """Folder of the data file of the Redis that `hone up` starts. None: the stack's own folder."""

    lease_s: float = Field(default=30.0, gt=0)
    """Seconds that an orchestrator's lease on the trainer and the samplers lasts without a
    heartbeat; then another one takes its job over. Long enough for a pause of Redis or of the
    process, short enough that a job soon continues."""

    max_key_jobs: int = Field(default=MAX_KEY_JOBS, ge=1)
    """Most jobs of one API key that have not ended; paused ones and models of programs count.
    A job has at most 1 MiB in Redis, whose memory all jobs share. Jobs that are submitted with
    HONE_TOKEN do not count: its holder can also raise this limit."""

    patience_s: float = Field(default=90.0, gt=0)
    """Seconds without a break that a service may be unavailable (unreachable, or answering 503)
    before a call to it fails. Long enough for a restart. A running job then waits until the service
    is back, and loads its model again. One sampler of several has a thirtieth of it: another one
    then samples its groups."""

    wait_limit_s: float | None = Field(default=None, gt=0)
    """Seconds that a running job waits for a missing service, its data or the folder of runs before
    it pauses; it keeps its trainer meanwhile. None: it waits as long as it takes, and continues
    automatically."""

    generate_deadline_s: float = Field(default=1800.0, gt=0)
    """Seconds for sampling one group, from when a sampler is asked. A completion that is not done
    then ends with `finish_reason` "timeout"; it is not graded and trains nothing. After a sixth of
    it another sampler with room is asked too. Less than `operation_deadline_s`: half of it by
    default, where it is at most 1800."""

    gpus: str | None = None
    """GPUs of the stack, for plans: a count and a name of `hone plan --gpus`, such as 1xA100-80GB.
    None: the GPUs that nvidia-smi shows where the plan is made, or the CPU."""

    price_per_hour: float | None = Field(default=None, ge=0)
    """Price of an hour of a job, in `currency`: GPUs, hosts and storage of one trainer with its
    samplers. None: unknown, so plans and jobs have no cost."""

    currency: str = Field(default="USD", pattern=r"^\S{1,8}$")
    """Currency of `price_per_hour`, as it is shown: up to 8 characters."""

    # the samplers: the engine, its memory, adapters

    rollout_model: str | None = None
    """Model folder or Hugging Face id that the sampler loads at its start, to serve it by hand.
    None: it waits for a job's."""

    rollout_replica: str | None = None
    """Name of this sampler among several, in rollouts and logs. None: its host's name and port."""

    rollout_advertise_url: str | None = None
    """URL by which the orchestrator reaches this sampler, such as http://10.0.0.7:8001. With it the
    sampler registers itself at `orchestrator_url`, until it ends. None: the orchestrator's
    `rollout_url` names it."""

    rollout_replicas: int = Field(default=1, ge=1, le=64)
    """Samplers that `hone up` starts for each trainer, on the ports from `rollout_port` on. More
    than 1 only where there is no GPU: there each needs GPUs of its own, and is started by hand. On
    a CPU with cores to spare two sample a tenth to a third faster than one."""

    kv_cache_gib: int = Field(default=1, gt=0)
    """GiB of memory for attention's keys and values where vLLM runs on a CPU."""

    colocate: bool = False
    """Sampler and trainer take turns on the same GPUs: while the trainer trains, the sampler sleeps
    and frees its memory; while the sampler samples, the optimizer is in the host's memory. Needs
    `max_staleness` 0 in every job. Off by default: with GPUs of its own neither waits for the
    other. Set it for orchestrator, trainer and sampler alike."""

    rollout_devices: Annotated[tuple[str, ...], Listed] = ()
    """GPUs of the sampler in the stack that `hone up` starts, as CUDA_VISIBLE_DEVICES names them:
    "0,1". Empty: the first `tensor_parallel_size`."""

    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes, weights and cache together. `hone up` lowers the
    default to 0.35 where sampler and trainer have to share a GPU, and to 0.6 where they take turns
    on it (`colocate`)."""

    sleep_mode: bool = False
    """Lets vLLM free its GPU memory while weights are exchanged, which `weight_sync = "reload"`
    needs. Off by default: vLLM then allocates memory in another way. Without effect on a CPU."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that the sampler's model is split over. 1 is fastest for a model that fits."""

    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences that vLLM samples at once; others wait. More need a larger cache. None: 256 on a
    CPU, and vLLM's default on a GPU: 1,024 from 70 GiB of memory on, and 256 below."""

    tool_parser: str | None = None
    """vLLM's parser of tool calls (its `--tool-call-parser`): "hermes" for Qwen2.5. None:
    `/generate` refuses requests with tools, and `/v1/chat/completions` takes them with
    `tool_choice` "none" alone, where the model's tool calls stay text."""

    rollout_adapters: int = Field(default=4, ge=1, le=64)
    """Jobs whose LoRA adapters (`weight_sync = "lora"`) a sampler serves side by side, those in
    training included: so many jobs of one base model may share a trainer and its samplers, 16 at
    most. 1: none does. Beyond it the adapter that was loaded longest ago is unloaded. Each takes
    its size in device memory, 80 MB for rank 16 of a 7B model. Without effect on jobs without
    `[lora]`."""

    shm_dir: Path = Path(f"/dev/shm/hone-{os.getuid()}")
    """Folder in shared memory for weights on their way to the sampler (`weight_sync = "shm"`); it
    holds three versions. Trainer and sampler must see the same one."""

    copies_dir: Path | None = None
    """Folder for weights that a sampler fetches from its trainer (`weight_sync` "http", "delta" and
    "lora"): at most twice the model's size. None: `shm_dir`, which must then be writable."""

    # the trainer: ranks, nodes, weights from GPU to GPU

    trainers: int = Field(default=1, ge=1, le=16)
    """Trainers that `hone up` starts, on the ports from `trainer_port` on, each with
    `rollout_replicas` samplers of its own: so many jobs run at once. More than 1 only where there
    is no GPU: there each service needs GPUs of its own, and is started by hand."""

    trainer_ranks: int = Field(default=1, ge=1)
    """Processes on each node, one per GPU."""

    trainer_devices: Annotated[tuple[str, ...], Listed] = ()
    """GPUs of the trainer in the stack that `hone up` starts, as CUDA_VISIBLE_DEVICES names them:
    "2,3". Empty: `trainer_ranks` GPUs that the sampler does not use, or else the sampler's."""

    trainer_nodes: int = Field(default=1, ge=1)
    """Machines that the trainer runs on. They share `runs_dir`; HTTP is on node 0."""

    trainer_node_rank: int = Field(default=0, ge=0)
    """Number of this machine among them, from 0."""

    trainer_rendezvous: str | None = None
    """Where the nodes meet: <host>:<port> of node 0, the same setting on each. Needed from two
    nodes on."""

    trainer_interface: str | None = None
    """Network interface that the nodes reach each other by, for example eth0. It must be of a
    private network: nothing on it is encrypted or authenticated. Needed from two nodes on."""

    # the reward service: the sandbox, queues, judges

    sandbox: Literal["auto", "local", "modal", "unsafe"] = "auto"
    """Where model-written code runs. "auto" is "local": in namespaces of this host, or not at all.
    "modal": in Modal Sandboxes. "unsafe": in plain processes with resource limits only."""

    sandbox_slots: int | None = Field(default=None, ge=1)
    """Programs that run at once. None: two per core but at most 8, or 32 on Modal."""

    sandbox_packages: Annotated[tuple[str, ...], Listed] = ()
    """Installed packages that model-written code may import, as "numpy,sympy". Empty: the
    standard library only."""

    allow_job_code: bool = True
    """Whether jobs may bring their own reward code, which runs in a sandbox of its own."""

    judge_url: str | None = None
    """OpenAI-compatible endpoint of the language models that judge. None: OpenAI's, if
    `judge_api_key` is set."""

    judge_api_key: SecretStr | None = None
    """API key of that endpoint."""

    # a deployment on Modal

    modal_name: str = Field(default="hone", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """Begins the names of the apps and Volumes on Modal. Another name is another deployment."""

    modal_trainer_gpu: str = "A100-80GB"
    """GPUs of the trainer on Modal, as Modal writes them, such as "H100:2": a rank for each. The
    default trains models up to 3B with all their weights."""

    modal_trainer_nodes: int = Field(default=1, ge=1, le=32)
    """Machines of the trainer on Modal, from 1 to 32, each with the GPUs of `modal_trainer_gpu`.
    Several must be whole machines, such as "H100:8": Modal calls them a cluster."""

    modal_rollout_gpu: str = "A10G"
    """GPUs of each sampler on Modal, as Modal writes them: its model is split over them. The
    default serves models up to 7B."""

    modal_rollouts: int = Field(default=1, ge=1, le=8)
    """Samplers on Modal, from 1 to 8, each a Server with GPUs of its own."""

    modal_secrets: Annotated[tuple[Literal["huggingface", "wandb", "judge"], ...], Listed] = ()
    """Secrets of third parties that the services on Modal get, with commas between several: each is
    the Modal Secret called "hone-" and its name. Empty: none, because a deployment that refers to a
    missing Secret fails."""

    modal_key: SecretStr | None = None
    """Id of the proxy token ("wk-...") that Modal asks of callers of a service there. It is sent
    only to hosts below modal.run and modal.direct. Needs `modal_secret`."""

    modal_secret: SecretStr | None = None
    """The secret of that proxy token ("ws-...")."""

    @model_validator(mode="before")
    @classmethod
    def _with_environment(cls, given: dict[str, Any]) -> dict[str, Any]:
        named = ((name, os.environ.get(PREFIX + name.upper())) for name in cls.model_fields)
        return {name: text for name, text in named if text is not None} | given

    def bearer(self) -> str | None:
        """Returns the token that requests carry, None for none."""
        return self.token.get_secret_value() if self.token else None

    @field_validator("orchestrator_url", "reward_url")
    @classmethod
    def _one(cls, value: str, info: ValidationInfo) -> str:
        service = str(info.field_name).removesuffix("_url")
        check_url(value, f"http://host:{PORTS[service]}")
        return value

    @field_validator("trainer_url")
    @classmethod
    def _trainers(cls, value: str) -> str:
        check_trainers(value)
        return value

    @field_validator("rollout_url")
    @classmethod
    def _samplers(cls, value: str, info: ValidationInfo) -> str:
        if (trainers := info.data.get("trainer_url")) is not None:  # else that is wrong already
            check_samplers(value, trainers)
        return value

    @property
    def short_deadline_s(self) -> float:
        """Seconds for a call that is short beside a step, so that a service that hangs is noticed:
        grading a group, publishing or loading weights, writing a checkpoint. At least 300: trainer
        and sampler may take that to find that weights cannot go from GPU to GPU."""
        return max(300.0, self.operation_deadline_s / 6)

    @property
    def rollout_urls(self) -> tuple[str, ...]:
        """The places in `rollout_url`, one by one, of all trainers."""
        return tuple(place for places in sampler_places(self.rollout_url) for place in places)

    @property
    def trainer_urls(self) -> tuple[str, ...]:
        """The trainers in `trainer_url`, one by one."""
        return trainer_urls(self.trainer_url)

    @property
    def per_trainer(self) -> tuple[Self, ...]:
        """A copy of these settings for each trainer, with only that trainer and its samplers."""
        if len(self.trainer_urls) == 1:
            return (self,)
        samplers = sampler_places(self.rollout_url)
        return tuple(
            self.model_copy(update={"trainer_url": trainer, "rollout_url": ",".join(places)})
            for trainer, places in zip(self.trainer_urls, samplers, strict=True)
        )

    @property
    def places(self) -> int:
        """How many jobs may share a trainer and its samplers."""
        return 1 if self.colocate else min(self.rollout_adapters, MAX_PLACES)

    @field_validator("generate_deadline_s")
    @classmethod
    def _within_operation(cls, value: float, info: ValidationInfo) -> float:
        longest_s = info.data.get("operation_deadline_s", math.inf)
        if value == 1800.0 >= longest_s:  # the default
            return longest_s / 2
        if value >= longest_s:
            raise ValueError(f"expected less than HONE_OPERATION_DEADLINE_S, {longest_s:g} s")
        return value

    @field_validator("teacher_url")
    @classmethod
    def _teacher(cls, value: str | None) -> str | None:
        if value is not None:
            check_url(value, "http://127.0.0.1:8000/v1")
        return value

    @field_validator("rollout_advertise_url")
    @classmethod
    def _advertised(cls, value: str | None) -> str | None:
        return value and check_service_url(value)

    def secrets(self) -> list[str]:
        """Returns the values that must never be logged, stored or sent."""
        named = [os.environ.get(name) for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")]
        own = [
            secret.get_secret_value()
            for secret in (
                *(self.token, self.redis_url, self.judge_api_key, self.teacher_api_key),
                self.modal_secret,
            )
            if secret
        ]
        found = (*named, *own, *_otel_secrets())
        return [value for value in found if value and len(value) >= 6]


def _otel_secrets() -> list[str]:
    """Returns the collector's secrets that OpenTelemetry's exporter may log: it shows headers that
    it cannot parse."""
    headers = [os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}HEADERS", "") for kind in OTEL_KINDS]
    parts = [part for text in headers for part in (text, *split(text))]
    values = [part.partition(mark)[2].strip() for part in parts for mark in "=:"]
    found = [*parts, *values, *map(unquote, (*parts, *values))]
    urls = [os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT", "") for kind in OTEL_KINDS]
    for url in urls:
        user, _, host = url.rpartition("@")
        password = user.partition("://")[2].partition(":")[2] if host else ""
        found += [password, unquote(password)]
    return sorted(found, key=len, reverse=True)  # the longest first: others are parts of it


_TOKEN = re.compile(r"[!-~]{8,}")
_NAME = re.compile(r"^'(\w+)")

FILE = "_FILE"
"""Suffix of a secret's variable: the variable with the suffix names the file that holds the
secret."""


ROW, REWARD_FILE = "HONE_ROW", "HONE_REWARD_FILE"
"""Variables that `hone work` gives a command: its row as JSON, and the file for its reward. They
are no settings."""


def load_settings() -> Settings:
    """Returns the settings in the environment. Raises BadRequest for an unknown `HONE_*` variable
    or a bad value, for a secret's file that cannot be read, for an invalid token, and for a host
    beyond loopback without a token."""
    secrets = secret_variables()
    _check_names(secrets)
    try:
        settings = Settings(**_from_files(secrets))
    except ValidationError as error:
        faults = [
            fault | {"detail": _NAME.sub(_in_environment, fault["detail"])}
            for fault in sentences(error, Settings)
        ]
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error
    token = settings.bearer()
    if token is not None and not _TOKEN.fullmatch(token):
        raise BadRequest(
            f"HONE_TOKEN has {len(token)} characters and is too short, or has a blank or another "
            "that is not visible ASCII; expected at least 8, such as `openssl rand -hex 16` prints"
        )
    if token is None and not is_loopback(settings.host):
        raise BadRequest(
            f"HONE_HOST is {settings.host!r} and HONE_TOKEN is not set: without a token a service "
            "listens on this machine only; "
            "set HONE_TOKEN, or HONE_HOST=127.0.0.1"
        )
    return settings


def _check_names(secrets: dict[str, str]) -> None:
    """Raises BadRequest for all variables with the prefix that are no settings."""
    names = [PREFIX + name.upper() for name in Settings.model_fields]
    valid = [*names, *(variable + FILE for variable in secrets.values()), ROW, REWARD_FILE]
    after = [name.removeprefix(PREFIX) for name in valid]  # the prefix makes all names alike
    told: list[str] = []
    for name in os.environ:
        if name.startswith(PREFIX) and name not in valid:
            near = closest(name.removeprefix(PREFIX), after)
            meant = f"; did you mean {PREFIX + near!r}?" if near else ";"
            told.append(f"unknown setting {name!r} in the environment{meant}")
    if told:
        raise BadRequest(f"{' '.join(told)} `hone explain settings` lists all")


def secret_variables() -> dict[str, str]:
    """Returns the variable of each setting that is a secret."""
    return {
        name: PREFIX + name.upper()
        for name, field in Settings.model_fields.items()
        if SecretStr in get_args(field.annotation)
    }


def _from_files(secrets: dict[str, str]) -> dict[str, Any]:
    """Returns the secrets whose files the environment names."""
    return {
        name: _read(variable, file)
        for name, variable in secrets.items()
        if (file := os.environ.get(variable + FILE)) is not None
    }


def _read(variable: str, file: str) -> SecretStr:
    if variable in os.environ:
        raise BadRequest(f"{variable} and {variable}{FILE} are both set; expected one of the two")
    try:
        text = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadRequest(f"{variable}{FILE} names {file!r}, which cannot be read: {why}") from error
    if not text:
        raise BadRequest(f"{variable}{FILE} names {file!r}, which is empty; expected the secret")
    return SecretStr(text)


def _in_environment(name: re.Match[str]) -> str:
    return f"'{PREFIX}{name[1].upper()}"
