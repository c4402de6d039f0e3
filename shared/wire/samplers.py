"""A sampler: the model it must serve, the weights that it serves, and its registration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from shared.http.urls import check_service_url
from shared.job import MAX_SERVED_RANK
from shared.wire.base import Beside, Fencing, JobId, Listing, Wire
from shared.wire.packed import Logprobs
from shared.wire.training import TrainerState


class EngineSpec(Wire):
    """The model that the sampler must serve.

    `max_model_len` bounds prompt plus completion, in tokens; None takes the model's own. `dtype`
    "auto" takes bfloat16 where the hardware has it and float32 elsewhere. `max_lora_rank` is the
    largest rank of adapters to serve beside the model, if its architecture supports adapters; None:
    none. With `sampling_masks` the answer lists the tokens that could be sampled, if these are not
    the whole vocabulary (`Rollout.kept_ids`).
    """

    model: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, gt=0)
    max_lora_rank: int | None = Field(default=None, ge=1, le=MAX_SERVED_RANK)
    seed: int = 0
    sampling_masks: bool = False


class ModelRequest(EngineSpec, Fencing):
    """`PUT /model`: serve this model. Putting the same model again starts nothing. A job names
    itself and its fence, and older fences are refused from then on; a request without a job names
    none.

    `own_weights`: the weights in the model's folder serve the job, as version 0; it loads no
    others. `keep_prefixes`: new weights leave the cache alone, see `SamplingSpec`. The attempts
    of `beside` are not superseded: their adapters continue serving."""

    job_id: JobId | None = None
    beside: Beside = ()
    own_weights: bool = False
    keep_prefixes: bool = False

    @property
    def spec(self) -> EngineSpec:
        return EngineSpec.model_validate(self.model_dump(include=set(EngineSpec.model_fields)))


class ServingWeights(Fencing):
    """`GET /weights`, and the answer to a reload: the weights that now serve. `version` None: no
    version of a job was loaded yet.

    The sampler computes `digest` over the tensors that it read, and `canary_logprobs` of the
    canary, in its `dtype`. `received_bytes` came over the network for it. `load_s` is the duration
    of the load, and `paused_s` the part of it in which no token was sampled. `replica` names the
    sampler, and `boot_id` identifies this start of its engine. It samples up to `max_num_seqs`
    completions at once, as far as its cache of `kv_cache_tokens` tokens has room; 0: unknown.
    `gpus` are the UUIDs of its GPUs, and `memory_space` is as in `TrainerState`. `doing` is the
    stage of an engine that is starting. `taken` is why the caller is refused: another
    orchestrator's job has the sampler.
    """

    job_id: JobId | None = None
    version: int | None = None
    digest: str | None = None
    model: str | None = None
    load_s: float = 0.0
    paused_s: float = 0.0
    received_bytes: int = 0
    canary_logprobs: Logprobs = Logprobs()
    dtype: str = ""
    replica: str = ""
    boot_id: str = ""
    max_num_seqs: int = 0
    kv_cache_tokens: int = 0
    gpus: tuple[str, ...] = ()
    memory_space: str | None = None
    doing: str | None = None
    taken: str | None = None


class SleepRequest(Fencing):
    """`POST /sleep`: free the GPU's memory until the job's next weights are loaded. Requests under
    way end."""

    job_id: JobId


class CheckedWeights(Wire):
    """`POST /weights/check`: `version` of `job_id` was loaded last, and should serve; None: the
    model that the engine started with. Of `num_tensors` tensors the engine's bytes differ for
    `differing`; `unread` could not be read back."""

    version: int | None
    job_id: JobId | None = None
    replica: str
    num_tensors: int
    differing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


class Registration(Wire):
    """`PUT /v1/samplers/{replica}` at the orchestrator: the sampler `replica` is at `url`, until
    its lease ends. Registering again renews the lease. It serves `version` of `job_id`; None: no
    version of a job. `boot_id` identifies this start of the sampler's process."""

    url: Annotated[str, AfterValidator(check_service_url)]
    job_id: JobId | None = None
    version: int | None = None
    boot_id: str = Field(default="", max_length=100)


class RegisteredSampler(Registration):
    """A registration until `expires_at`, in Unix seconds: `lease_s` seconds after the last
    renewal."""

    replica: str
    lease_s: float
    expires_at: float


class SamplerList(Wire):
    """`GET /v1/samplers`: the registered samplers, by name."""

    samplers: tuple[RegisteredSampler, ...]


class ServiceState(Wire):
    """The state of a service. `error` says why it does not answer now; `answered_at` is when it
    last did, in Unix seconds, as far as this orchestrator knows. `trainer` and `sampler` are the
    answers of a trainer and a sampler. `gauges` are its metrics without labels, by their names
    without `hone_<service>_`, such as "running_requests" and "memory_bytes"."""

    service: Literal["trainer", "rollout", "reward"]
    url: str
    error: str | None = None
    answered_at: float | None = None
    trainer: TrainerState | None = None
    sampler: ServingWeights | None = None
    gauges: dict[str, float] = {}


class ServiceList(Wire):
    """`GET /v1/services`: trainers, samplers and the reward service."""

    services: tuple[ServiceState, ...]


class SamplerSync(Wire):
    """How one sampler received a version: seconds of its load, the seconds in which it sampled
    nothing, and bytes that came over the network. `canary_difference` is the mean distance of its
    log-probs to the trainer's on the canary, in nats; None: not measured."""

    replica: str
    load_s: float
    paused_s: float
    received_bytes: int
    canary_difference: float | None = None


class Sync(Wire):
    """How a version of the weights reached the samplers. `digest` is of the bytes that each sampler
    read itself, which verifies the version. `seconds` is from its publication until the last one
    served it."""

    version: int
    method: str
    digest: str
    size_bytes: int
    seconds: float
    samplers: tuple[SamplerSync, ...]


class SyncList(Listing[Sync]):
    """`GET /v1/jobs/{id}/syncs`: the job's last syncs, oldest first."""

    syncs: tuple[Sync, ...]


class Unregistered(Wire):
    """`DELETE /v1/samplers/{replica}`: it gets no further groups. With `?boot_id=` only that
    process is unregistered, and not a later sampler of that name."""

    replica: str
