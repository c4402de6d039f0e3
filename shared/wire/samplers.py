"""A sampler: the model it is to serve, the weights that serve, and where it is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from shared.job import MAX_SERVED_RANK
from shared.packed import Logprobs
from shared.urls import check_service_url
from shared.wire.base import Fenced, Fencing, JobId, Wire


class EngineSpec(Wire):
    """What the sampler must serve.

    `max_model_len` bounds prompt plus completion, in tokens; None takes the model's own. `dtype`
    "auto" takes bfloat16 where the hardware has it and float32 elsewhere. `max_lora_rank` is the
    largest rank of adapters to serve beside the model, if its architecture takes any; None: none.
    With `sampling_masks` a request that samples from parts of the vocabulary is told which
    (`Rollout.kept_ids`).
    """

    model: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, gt=0)
    max_lora_rank: int | None = Field(default=None, ge=1, le=MAX_SERVED_RANK)
    seed: int = 0
    sampling_masks: bool = False


class ModelRequest(EngineSpec, Fencing):
    """`PUT /model`: serve this. Putting the same one twice starts nothing twice. A job names itself
    and its fence, and older ones are refused from then on; a request by hand names no job.

    `own_weights`: the weights that the model has in its folder serve the job, as version 0: it
    loads no others."""

    job_id: JobId | None = None
    own_weights: bool = False

    @property
    def spec(self) -> EngineSpec:
        return EngineSpec.model_validate(self.model_dump(include=set(EngineSpec.model_fields)))


class ServingWeights(Fencing):
    """`GET /weights`, and the answer to a reload: what now serves. `version` None: no version of a
    job was loaded yet.

    `digest` is of the tensors the sampler read, computed by the sampler; `canary_logprobs` are its
    own of the canary, in its `dtype`. `received_bytes` came over the network for it. `load_s` is
    all that the load took, and `paused_s` the part of it in which no token was sampled. `replica`
    names the sampler, and `boot_id` this life of its engine. It samples `max_num_seqs` completions
    at once, as far as they have room in its cache, which holds `kv_cache_tokens` tokens; 0: it does
    not say. `gpus` are the UUIDs of those that it computes on, and `memory_space` is as the
    trainer's in `TrainerState`. `doing` says what takes long while
    an engine starts, and `taken` why who asks gets nothing: another orchestrator's job has it.
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


class SleepRequest(Fenced):
    """`POST /sleep`: free the GPU's memory, weights included, until the next version is loaded."""


class CheckedWeights(Wire):
    """`POST /weights/check`: `version` serves by its label; None: the model of the engine's start.
    `differing` are the tensors, of `num_tensors`, of which the engine holds other bytes, and
    `unread` those that could not be read back."""

    version: int | None
    replica: str
    num_tensors: int
    differing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


class PauseState(Wire):
    paused: bool


class Registration(Wire):
    """`PUT /v1/samplers/{replica}` at the orchestrator: the sampler `replica` is at `url`, until
    its lease ends. Registering again renews the lease. `version` of `job_id` serves; None: no
    version of a job. `boot_id` names this life of the sampler."""

    url: Annotated[str, AfterValidator(check_service_url)]
    job_id: JobId | None = None
    version: int | None = None
    boot_id: str = Field(default="", max_length=100)


class RegisteredSampler(Registration):
    """Registered until `expires_at`, in Unix seconds: `lease_s` seconds after its lease was renewed
    last."""

    replica: str
    lease_s: float
    expires_at: float


class SamplerList(Wire):
    """`GET /v1/samplers`: those that registered themselves, by name."""

    samplers: tuple[RegisteredSampler, ...]


class Unregistered(Wire):
    """`DELETE /v1/samplers/{replica}`: it gets no further groups. With `?boot_id=` only that life
    of the sampler is unregistered, and not the next one of its name."""

    replica: str
