"""Settings: where the services run, and secrets. From the environment, `HONE_*`, and never sent
over the API.

How they are read from it is in environment.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from shared.urls import (
    check_samplers,
    check_service_url,
    check_trainers,
    sampler_places,
    trainer_urls,
)

PREFIX = "HONE_"

PORTS = {"orchestrator": 8000, "rollout": 8001, "trainer": 8002, "reward": 8003, "redis": 6379}


OTEL_KINDS = ("", "TRACES_")
"""OpenTelemetry's variables for all that it exports, and for traces alone."""


class Settings(BaseSettings):
    """Every setting of every service, by the service that reads it. In the environment a setting is
    `HONE_` and its name in capitals. The text under a setting is its documentation, which `hone
    explain` shows."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    # every service

    host: str = "127.0.0.1"
    """Address to listen on. The default is this machine only; another address needs `token`."""

    token: SecretStr | None = None
    """Bearer token: every request but `/healthz`, `/readyz` and `/version` must carry it, and
    services and `hone` send it. At least 8 visible ASCII characters: it goes into a header, and
    must not be guessed. None: no authentication, and loopback only. This and the other secrets
    (`redis_url`, `judge_api_key`) may be in a file, which HONE_TOKEN_FILE then names."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""

    log_format: Literal["json", "console"] = "json"
    """"json": one object per line, for machines; "console": for people."""

    otel_endpoint: str | None = None
    """Collector that traces of steps are sent to over OTLP/HTTP, for example
    http://127.0.0.1:4318, for all services alike. Needs the extra `otel`. None: that of
    OTEL_EXPORTER_OTLP_ENDPOINT, else there are no traces and OpenTelemetry is not imported."""

    max_body_mib: int = Field(default=1024, gt=0)
    """Largest request body, in MiB. A step's batch is one body, 9 bytes per token."""

    operation_deadline_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a service gives up work that a request asked for. Not less than the
    longest deadline of a caller."""

    runs_dir: Path = Path("runs")
    """Where jobs leave their results, one folder per job. Orchestrator, trainer and sampler share
    it."""

    runs_commit: str | None = None
    """Command that keeps what was written into `runs_dir` and shows it to other hosts, for volumes
    that do not do so by themselves. Run after each checkpoint, and after weights were published
    there (`weight_sync = "disk"`). None: the volume needs none."""

    runs_refresh: str | None = None
    """Command that shows this host what others wrote into `runs_dir`, run before such weights are
    read, and when an uploaded file is not there. None: the volume needs none."""

    data_dirs: Annotated[tuple[Path, ...] | None, NoDecode] = None
    """Folders below which the data files lie that jobs may name, with commas between several. None:
    any file that the orchestrator can read while it listens on this machine only, and none
    otherwise, or if an API key submits the job; a file that is not allowed can be uploaded."""

    max_file_mib: int = Field(default=512, gt=0)
    """Largest uploaded file, in MiB. The default is OpenAI's. `max_body_mib` bounds it too."""

    max_files: int = Field(default=10_000, ge=1)
    """How many uploaded files there may be. Beyond it uploads are refused until some are removed.
    The default is what a list shows at once."""

    max_files_gib: float = Field(default=100.0, gt=0)
    """GiB that all uploaded files may take together, so that they leave some of the disk for jobs.
    Beyond it uploads are refused until some are removed. The default is OpenAI's for an
    organization."""

    filter_cpu_s: float = Field(default=120.0, gt=0)
    """Seconds of processor time that `data.filter` of a job may take over all rows of a source; of
    a stream, until it is true of one. The default is enough for some millions of rows: others wait
    for the process that runs all filters and templates."""

    # where each service is, for those that call it and for itself (its port)

    orchestrator_url: str = f"http://127.0.0.1:{PORTS['orchestrator']}"
    """Where `hone` finds the orchestrator. If it is not set, a stack of `hone up` comes first."""

    trainer_url: str = f"http://127.0.0.1:{PORTS['trainer']}"
    """Where the orchestrator finds the trainer, and the sampler for `weight_sync = "http"`,
    "delta", and "lora" on another machine: node 0, of several. For the orchestrator there may be
    several trainers, with semicolons between them, each with samplers of its own (`rollout_url`):
    so many jobs run at once. Orchestrators that share Redis and a trainer on another machine have
    to name its host alike: a job's lease is on the trainer at this host and port, and on the
    samplers at theirs."""

    rollout_url: str = f"http://127.0.0.1:{PORTS['rollout']}"
    """Where the orchestrator finds the samplers, with commas between several places: a URL;
    dns+http://<name>:<port>, which is one at each address of the name, looked up every 5 s; or
    "registered", which is every sampler that has `rollout_advertise_url`. Of several trainers each
    has its own, in the order of `trainer_url`, with a semicolon between them:
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

    # orchestrator

    redis_url: SecretStr | None = None
    """Redis, for example redis://:password@host:6379/0. It must have `appendonly yes`, `appendfsync
    always` and `maxmemory-policy noeviction`. None: only `hone up` works, which starts one."""

    redis_dir: Path | None = None
    """Folder of the file in which the Redis that `hone up` starts has all it knows. None: in the
    stack's own folder."""

    lease_s: float = Field(default=30.0, gt=0)
    """Seconds that an orchestrator's lease on the trainer and the samplers lasts without a
    heartbeat; then another one takes its job over. Long enough for a pause of Redis or of the
    process, short enough that a job soon goes on."""

    keep_jobs: int = Field(default=1000, ge=1)
    """How many of the jobs that have ended are kept in Redis. Older ones are forgotten, with their
    events; their run folders stay. The default keeps Redis at a few GB."""

    keep_events: int = Field(default=20_000, ge=100)
    """How many of the newest events of each job are kept, at least. The default is those of jobs of
    some 15,000 steps."""

    stall_s: float = Field(default=600.0, gt=0)
    """Seconds in which a running job gets no answer at all (no group sampled or graded, no step, no
    weights, no checkpoint) after which its events name who waits for whom. If nothing is under way
    then, the job is loaded again. Above what one call usually takes, below the deadlines."""

    patience_s: float = Field(default=90.0, gt=0)
    """Seconds on end that a service may be away (unreachable, or answering 503) before a call to it
    fails. Long enough for a restart."""

    replica_patience_s: float = Field(default=3.0, gt=0)
    """The same for one sampler of several, whose groups another one then samples. Long enough for a
    connection that was lost, for nothing has to wait for a restart."""

    hedge_s: float = Field(default=300.0, gt=0)
    """Seconds that a group is under way before another sampler is asked for it too, if one has
    room: the first answer counts. Well above what a group usually takes, as it is sampled twice."""

    generate_deadline_s: float = Field(default=1800.0, gt=0)
    """Seconds for sampling one group, from when a sampler is asked. What is not done then ends with
    `finish_reason` "timeout", which is not graded and trains nothing."""

    score_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds for grading one group, its wait for other groups included."""

    train_deadline_s: float = Field(default=3600.0, gt=0)
    """Seconds for training on one batch."""

    sync_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds each for publishing weights, for loading them, and for writing a checkpoint."""

    start_deadline_s: float = Field(default=1800.0, gt=0)
    """Seconds for loading a job's model into trainer or sampler, its download included."""

    gpus: str | None = None
    """GPUs of the stack, for plans and prices: a count and a name of `hone plan --gpus`, such as
    1xA100-80GB, or two of them with a comma, the trainer's first. None: those that nvidia-smi shows
    where the plan is made, or the CPU."""

    prices: Path | None = None
    """TOML file with what an hour of a GPU costs, a table for each provider. None: the one that
    comes with Hone, `shared/plan/prices.toml`, which has the dates and sources of its prices."""

    provider: str = "modal"
    """Table of `prices` that costs are worked out by. The default is the one with the most
    GPUs."""

    price_per_hour: float | None = Field(default=None, ge=0)
    """What an hour of everything that a job has costs, in `currency`: GPUs, hosts and storage, of
    one trainer with its samplers. None: the sum of the prices of `gpus`."""

    currency: str = Field(default="USD", pattern=r"^\S{1,8}$")
    """Currency of `price_per_hour`, as it is shown: up to 8 characters. A table of `prices` has its
    own."""

    max_missing_rewards: float = Field(default=0.5, ge=0, le=1)
    """Share of a batch's rewards, from 0 to 1, that may be missing. Beyond it the job pauses rather
    than learn from what few graders still answered."""

    # rollout

    rollout_model: str | None = None
    """Model folder or Hugging Face id that the sampler loads at its start, to serve it by hand.
    None: it waits for a job's."""

    rollout_replica: str | None = None
    """Name of this sampler among several, in rollouts and logs. None: its host's name and port."""

    rollout_advertise_url: str | None = None
    """URL by which the orchestrator reaches this sampler, such as http://10.0.0.7:8001. With it the
    sampler registers itself at `orchestrator_url`, until it ends. None: it is named in
    `rollout_url` there."""

    rollout_replicas: int = Field(default=1, ge=1, le=64)
    """Samplers that `hone up` starts for each trainer, on the ports from `rollout_port` on. More
    than 1 only where there is no GPU: there each needs GPUs of its own, and is started by hand."""

    kv_cache_gib: int = Field(default=1, gt=0)
    """GiB of memory for attention's keys and values where vLLM runs on a CPU."""

    colocate: bool = False
    """Sampler and trainer take turns on the same GPUs: while the trainer trains, the sampler sleeps
    and frees its memory; while the sampler samples, the optimizer lies in the host's. Needs
    `max_staleness` 0 in every job. Off by default: with GPUs of its own neither waits for the
    other. Set it for orchestrator, trainer and sampler alike."""

    rollout_devices: Annotated[tuple[str, ...], NoDecode] = ()
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

    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences that vLLM samples at once; others wait. More need a larger cache."""

    tool_parser: str | None = None
    """vLLM's parser of tool calls (its `--tool-call-parser`) for `/v1/chat/completions`: "hermes"
    for Qwen2.5. None: a request with tools must say `tool_choice` "none", and what the model calls
    stays text."""

    max_sessions: int = Field(default=1024, ge=1)
    """Sessions (recorded agents) that the sampler keeps at once. For one more, that which was idle
    longest is forgotten."""

    sessions_mib: int = Field(default=2048, ge=1)
    """Memory, in MiB, that all sessions may take together: tokens with their log-probs (13 bytes
    per token), what each token was drawn from under `top_p`, `top_k` or `min_p` (4 bytes for each
    of these), messages, and the last answers. Beyond it those idle longest are forgotten, and a
    session that takes all of it gets no further turn. The default holds 1,024 sessions of 100,000
    tokens without masks."""

    max_session_tokens: int = Field(default=262_144, ge=1)
    """Tokens that one session may have, those of tools and users included. Beyond it the next turn
    is refused. The default is twice the context of most models."""

    session_idle_s: float = Field(default=3600.0, gt=0)
    """Seconds without a turn after which a session is forgotten. Long enough for the slowest tool,
    and for whoever fetches the record."""

    rollout_adapters: int = Field(default=4, ge=1, le=64)
    """Jobs whose LoRA adapters (`weight_sync = "lora"`) a sampler serves side by side, the one in
    training included. Beyond it the one that was loaded longest ago is unloaded. Each takes its
    size in device memory, 80 MB for rank 16 of a 7B model. Without effect on jobs without
    `[lora]`."""

    shm_dir: Path = Path(f"/dev/shm/hone-{os.getuid()}")
    """Folder in shared memory for weights on their way to the sampler (`weight_sync = "shm"`); it
    holds three versions. Trainer and sampler must see the same one."""

    copies_dir: Path | None = None
    """Folder for what a sampler fetched from its trainer itself (`weight_sync` "http", "delta" and
    "lora"): twice the model's weights at most. None: `shm_dir`, which it must then be able to write
    to."""

    # trainer

    trainers: int = Field(default=1, ge=1, le=16)
    """Trainers that `hone up` starts, on the ports from `trainer_port` on, each with
    `rollout_replicas` samplers of its own: so many jobs run at once. More than 1 only where there
    is no GPU: there each service needs GPUs of its own, and is started by hand."""

    trainer_ranks: int = Field(default=1, ge=1)
    """Processes on each node, one per GPU."""

    trainer_devices: Annotated[tuple[str, ...], NoDecode] = ()
    """GPUs of the trainer in the stack that `hone up` starts, as CUDA_VISIBLE_DEVICES names them:
    "2,3". Empty: `trainer_ranks` of those that the sampler leaves, or shared ones."""

    trainer_threads: int | None = Field(default=None, ge=1)
    """CPU threads per rank. None: the cores of the node, shared out."""

    trainer_restarts: int = Field(default=3, ge=0)
    """How often in ten minutes ranks that died are started again. Beyond it the trainer ends, for
    what always fails would fail again."""

    trainer_nodes: int = Field(default=1, ge=1)
    """Machines that the trainer runs on. They share `runs_dir`; HTTP is on node 0."""

    trainer_node_rank: int = Field(default=0, ge=0)
    """Number of this machine among them, from 0."""

    trainer_rendezvous: str | None = None
    """Where the nodes meet, the same on each: <host>:<port> of node 0. Needed from two nodes on."""

    trainer_interface: str | None = None
    """Network interface that the nodes reach each other by, for example eth0. It must be of a
    private network: nothing on it is encrypted or authenticated. Needed from two nodes on."""

    transfer_deadline_s: float = Field(default=60.0, gt=0)
    """Seconds that trainer and sampler wait for each other while weights go from GPU to GPU
    (`weight_sync` "nccl" and "ipc"). Then the version goes by "http". Longer than the largest
    model takes, for sampling waits meanwhile. At most a fifth of `sync_deadline_s`: a sampler takes
    up to five of them, until it is its turn, to meet, to receive and to load."""

    # reward

    sandbox: Literal["auto", "local", "modal", "unsafe"] = "auto"
    """Where model-written code runs. "auto" is "local": in namespaces of this host, or not at all.
    "modal": in Modal Sandboxes. "unsafe": in plain processes with resource limits only."""

    sandbox_slots: int | None = Field(default=None, ge=1)
    """Programs that run at once. None: two per core but at most 8, or 32 on Modal."""

    sandbox_packages: Annotated[tuple[str, ...], NoDecode] = ()
    """Installed packages that model-written code may import, as "numpy,sympy". Empty: the
    standard library only."""

    sandbox_image: str | None = None
    """Container image of Modal Sandboxes. None: Debian with Python."""

    allow_job_code: bool = True
    """Whether jobs may bring their own reward code, which runs in a sandbox of its own."""

    reward_cache_mib: int = Field(default=64, ge=0)
    """MiB of verdicts that are kept for completions that come again. 0 keeps none."""

    max_queued_completions: int = Field(default=32_768, ge=1)
    """Completions that may wait for grading or be graded. Beyond it the answer is 429, and callers
    ask again later."""

    max_queued_programs: int = Field(default=4096, ge=1)
    """Programs of `/execute` that may wait or run. Beyond it the answer is 429."""

    judge_url: str | None = None
    """OpenAI-compatible endpoint of the language models that judge. None: OpenAI's, if
    `judge_api_key` is set."""

    judge_api_key: SecretStr | None = None
    """API key of that endpoint."""

    # Modal: what `modal deploy` of the files in deploy/modal makes, and how it is reached

    modal_name: str = Field(default="hone", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """Begins the names of the apps and Volumes on Modal. Another name is another deployment."""

    modal_trainer_gpu: str = "A100-80GB"
    """GPUs of the trainer on Modal, as Modal writes them, such as "H100:2": a rank for each. The
    default trains models up to 3B with all their weights."""

    modal_rollout_gpu: str = "A10G"
    """GPUs of each sampler on Modal, likewise: its model is split over them. The default serves
    models up to 7B."""

    modal_rollouts: int = Field(default=1, ge=1, le=8)
    """Samplers on Modal, from 1 to 8, each a Server with GPUs of its own."""

    modal_secrets: Annotated[tuple[Literal["huggingface", "wandb", "judge"], ...], NoDecode] = ()
    """Which secrets of others the services on Modal get, with commas between several: each is the
    Modal Secret of its name after "hone-". Empty: none, for a deployment refers to no Secret that
    does not exist."""

    modal_key: SecretStr | None = None
    """Id of the proxy token ("wk-...") that Modal asks of whoever calls a service there. It is sent
    to hosts below modal.run and modal.direct, and to no other. Needs `modal_secret`."""

    modal_secret: SecretStr | None = None
    """The secret of that proxy token ("ws-...")."""

    @field_validator(
        "sandbox_packages", "rollout_devices", "trainer_devices", "modal_secrets", mode="before"
    )
    @classmethod
    def _names(cls, value: Any) -> Any:
        """In the environment they are one text: "numpy,sympy"."""
        return tuple(_split(value)) if isinstance(value, str) else value

    @field_validator("data_dirs", mode="before")
    @classmethod
    def _folders(cls, value: Any) -> Any:
        return tuple(map(Path, _split(value))) if isinstance(value, str) else value

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

    @field_validator("rollout_advertise_url")
    @classmethod
    def _advertised(cls, value: str | None) -> str | None:
        return value and check_service_url(value)

    @property
    def rollout_urls(self) -> tuple[str, ...]:
        """The places in `rollout_url`, one by one, of all trainers."""
        return tuple(place for places in sampler_places(self.rollout_url) for place in places)

    @property
    def trainer_urls(self) -> tuple[str, ...]:
        """The trainers in `trainer_url`, one by one."""
        return trainer_urls(self.trainer_url)

    @property
    def slots(self) -> tuple[Settings, ...]:
        """These settings for each trainer: with that one, and with its samplers."""
        if len(self.trainer_urls) == 1:
            return (self,)
        samplers = sampler_places(self.rollout_url)
        return tuple(
            self.model_copy(update={"trainer_url": trainer, "rollout_url": ",".join(places)})
            for trainer, places in zip(self.trainer_urls, samplers, strict=True)
        )

    def bearer(self) -> str | None:
        return self.token.get_secret_value() if self.token else None

    def secrets(self) -> list[str]:
        """Returns the values that must never be logged, stored or sent."""
        named = [os.environ.get(name) for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")]
        own = [
            secret.get_secret_value()
            for secret in (self.token, self.redis_url, self.judge_api_key, self.modal_secret)
            if secret
        ]
        found = (*named, *own, *_otel_secrets(self.otel_endpoint))
        return [value for value in found if value and len(value) >= 6]


def _otel_secrets(endpoint: str | None) -> list[str]:
    """Returns what OpenTelemetry's exporter knows of its collector's secrets, as it may log them:
    it shows headers that it cannot read."""
    headers = [os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}HEADERS", "") for kind in OTEL_KINDS]
    parts = [part for text in headers for part in (text, *_split(text))]
    values = [part.partition(mark)[2].strip() for part in parts for mark in "=:"]
    found = [*parts, *values, *map(unquote, (*parts, *values))]
    urls = [os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT", "") for kind in OTEL_KINDS]
    for url in (*urls, endpoint or ""):
        user, _, host = url.rpartition("@")
        password = user.partition("://")[2].partition(":")[2] if host else ""
        found += [password, unquote(password)]
    return sorted(found, key=len, reverse=True)  # the longest first: others are parts of it


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
