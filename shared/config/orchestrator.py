"""Settings of the orchestrator: Redis, leases, deadlines, and what a job costs."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from shared.config.base import FromEnvironment


class OrchestratorSettings(FromEnvironment):
    """What the orchestrator alone has."""

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
    fails. Long enough for a restart. A running job then waits until the service is back, and loads
    its model again."""

    wait_limit_s: float | None = Field(default=None, gt=0)
    """Seconds that a running job waits for what it needs and is not there (a service, its data, the
    folder of runs) before it pauses; it keeps its trainer meanwhile. None: for as long as it takes,
    and it goes on by itself."""

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
    one trainer with its samplers. None: the sum of the prices of all of `gpus`, for each job: set
    this where there are several trainers."""

    currency: str = Field(default="USD", pattern=r"^\S{1,8}$")
    """Currency of `price_per_hour`, as it is shown: up to 8 characters. A table of `prices` has its
    own."""

    max_missing_rewards: float = Field(default=0.5, ge=0, le=1)
    """Share of a batch's rewards, from 0 to 1, that may be missing. Beyond it the job pauses rather
    than learn from what few graders still answered."""
