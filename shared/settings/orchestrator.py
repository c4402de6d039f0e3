"""Settings of the orchestrator: Redis, leases, deadlines, and what a job costs."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from shared.settings.base import FromEnvironment


class OrchestratorSettings(FromEnvironment):
    """What the orchestrator alone has."""

    redis_url: SecretStr | None = None
    """Redis, for example redis://:password@host:6379/0. It must have `appendonly yes`, `appendfsync
    always` and `maxmemory-policy noeviction`. None: only `hone up` works, which starts one."""

    redis_dir: Path | None = None
    """Folder of the data file of the Redis that `hone up` starts. None: the stack's own folder."""

    lease_s: float = Field(default=30.0, gt=0)
    """Seconds that an orchestrator's lease on the trainer and the samplers lasts without a
    heartbeat; then another one takes its job over. Long enough for a pause of Redis or of the
    process, short enough that a job soon goes on."""

    keep_jobs: int = Field(default=1000, ge=1)
    """How many ended jobs are kept in Redis. Older ones are forgotten, with their events; their run
    folders stay. The default keeps Redis at a few GB."""

    keep_events: int = Field(default=20_000, ge=100)
    """How many of the newest events of each job are kept, at least. The default is enough for a job
    of some 15,000 steps."""

    stall_s: float = Field(default=600.0, gt=0)
    """Seconds without any answer to a running job (no group sampled or graded, no step, no weights,
    no checkpoint) after which its events say which service is waited for. If nothing is under way
    then, the job is loaded again. Longer than one call usually takes, shorter than the
    deadlines."""

    patience_s: float = Field(default=90.0, gt=0)
    """Seconds without a break that a service may be away (unreachable, or answering 503) before a
    call to it fails. Long enough for a restart. A running job then waits until the service is back,
    and loads its model again."""

    wait_limit_s: float | None = Field(default=None, gt=0)
    """Seconds that a running job waits for a missing service, its data or the folder of runs before
    it pauses; it keeps its trainer meanwhile. None: it waits as long as it takes, and goes on by
    itself."""

    replica_patience_s: float = Field(default=3.0, gt=0)
    """`patience_s` for one sampler of several; another sampler then samples its groups. Long enough
    for a lost connection. It need not cover a restart, because the other samplers go on."""

    hedge_s: float = Field(default=300.0, gt=0)
    """Seconds that a group is under way before another sampler is asked for it too, if one has
    room: the first answer counts. Well above what a group usually takes, as it is sampled twice."""

    generate_deadline_s: float = Field(default=1800.0, gt=0)
    """Seconds for sampling one group, from when a sampler is asked. A completion that is not done
    then ends with `finish_reason` "timeout"; it is not graded and trains nothing."""

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
    1xA100-80GB, or two of them with a comma, the trainer's first. None: the GPUs that nvidia-smi
    shows where the plan is made, or the CPU."""

    prices: Path | None = None
    """TOML file with the price of an hour of each GPU, a table for each provider. None:
    `shared/plan/prices.toml`, which has the dates and sources of its prices."""

    provider: str = "modal"
    """Table of `prices` that costs are computed with. The default is the table with the most
    GPUs."""

    price_per_hour: float | None = Field(default=None, ge=0)
    """Price of an hour of a job, in `currency`: GPUs, hosts and storage of one trainer with its
    samplers. None: the sum of the prices of all of `gpus`, for each job: set this where there are
    several trainers."""

    currency: str = Field(default="USD", pattern=r"^\S{1,8}$")
    """Currency of `price_per_hour`, as it is shown: up to 8 characters. A table of `prices` has its
    own."""

    max_missing_rewards: float = Field(default=0.5, ge=0, le=1)
    """Share of a batch's rewards, from 0 to 1, that may be missing. Beyond it the job pauses rather
    than learn from the few rewards that are left."""
