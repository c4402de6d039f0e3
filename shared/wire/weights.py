"""Published weights: one version, and where a sampler gets it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, RootModel

from shared.job import SyncMethod
from shared.weights.meeting import LOADING_DEADLINES, MEETING_DEADLINES
from shared.wire.base import Fenced, Logprobs, TokenIds, Wire


class PublishRequest(Fenced):
    """`POST /publish_weights`: make version `version` (the trainer's step; else 409) loadable by
    samplers. `snapshot`, of the method "lora" alone: the number under which the adapter stays in
    the run folder, until it is removed there."""

    version: int = Field(ge=0)
    method: SyncMethod
    snapshot: int | None = Field(default=None, ge=0)


class Canary(Wire):
    """A fixed sequence and its log-probs by the trainer's weights of the version: `logprobs` `[T -
    1]` of all tokens but the first, in nats, at temperature 1, computed in `dtype`. `noise`: by how
    many nats they differ on average where every result on the way is rounded otherwise; 0: it was
    not measured."""

    token_ids: TokenIds
    logprobs: Logprobs
    dtype: str = "float32"
    noise: float = 0.0


class Published(Fenced):
    """The fields of every published version, with any sync method.

    `digest` is of all tensors and `tensors` of each, by name: names, dtypes, shapes and bytes,
    however they are spread over files (`shared/weights/folders.py`). The sampler computes the
    digest again when it loads the version. `again`: the sampler's weights were found wrong, so it
    must load this version even if it serves it already.
    """

    version: int = Field(ge=0)
    digest: str
    size_bytes: int
    tensors: dict[str, str] = {}
    canary: Canary | None = None
    again: bool = False


class FolderWeights(Published):
    """Safetensors files in a folder that the sampler sees: in shared memory ("shm") or on a shared
    volume, loaded in place, after the engine's memory was freed ("reload"), or by a new engine
    ("restart")."""

    method: Literal["shm", "disk", "reload", "restart"]
    path: str


class WeightFile(Wire):
    """A file to fetch from the trainer, in ranges if need be. `path` is a path of the trainer's
    API: the sampler's own settings give the trainer's address."""

    path: str = Field(pattern=r"^/weights(/[A-Za-z0-9_-][A-Za-z0-9._-]*){3}$")
    size_bytes: int = Field(ge=0)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class HttpWeights(Published):
    """Safetensors files to fetch."""

    method: Literal["http"]
    files: tuple[WeightFile, ...]


class DeltaStep(Wire):
    """From the version with `base_digest` to the version with `digest`: a file with the elements
    whose bits differ (`shared/weights/delta.py`), `num_changed` of `num_elements`."""

    base_digest: str
    digest: str
    file: WeightFile
    num_changed: int
    num_elements: int


class DeltaWeights(Published):
    """`steps` that lead to this version, oldest first: a sampler begins with the step whose base is
    its own copy. `files` are the whole version, for a sampler that has no such copy."""

    method: Literal["delta"]
    files: tuple[WeightFile, ...]
    steps: tuple[DeltaStep, ...] = ()


class AdapterWeights(Published):
    """A LoRA adapter as PEFT writes it, in the folder `path` or, for a sampler that does not see
    the folder, as `files` to fetch. `adapter` is its name, never used again. `tensors` and `digest`
    cover its configuration too (`shared/weights/folders.py`)."""

    method: Literal["lora"]
    path: str
    files: tuple[WeightFile, ...] = ()
    adapter: str


class SentTensor(Wire):
    """A tensor that the trainer sends from its device; `dtype` is torch's name, "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SharedTensor(SentTensor):
    """A tensor's place in its GPU's memory, as `torch.multiprocessing.reductions` gives it, bytes
    in hex."""

    stride: tuple[int, ...]
    offset: int
    handle: str
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: str
    ref_counter_offset: int
    event_handle: str
    event_sync_required: bool


class SentWeights(Published):
    """A version sent from device to device, in no file. Each side waits `deadline_s` seconds for
    the other. For a sampler that did not receive it, or joins later, the trainer publishes the same
    version as files, for as long as it is at that step."""

    deadline_s: float = Field(gt=0)

    @property
    def bound_s(self) -> float:
        """Most seconds of the whole transfer."""
        return (MEETING_DEADLINES + LOADING_DEADLINES) * self.deadline_s


class BroadcastWeights(SentWeights):
    """Sent to every sampler that connects to `port` of the trainer's host and knows `key`: each of
    `chunks` is one packed tensor of bytes."""

    method: Literal["nccl"]
    port: int
    key: str
    chunks: tuple[tuple[SentTensor, ...], ...]


class SharedWeights(SentWeights):
    """Read by the sampler in the trainer's memory, on the GPU with this UUID."""

    method: Literal["ipc"]
    gpu: str
    shared: tuple[SharedTensor, ...]


AnyWeights = (
    FolderWeights | HttpWeights | DeltaWeights | AdapterWeights | BroadcastWeights | SharedWeights
)


class WeightsRef(RootModel[Annotated[AnyWeights, Field(discriminator="method")]]):
    """One published version, told apart by `method`: the answer to `POST /publish_weights` and the
    body of `POST /reload_weights`. A version with a newer fence may be older than the version that
    serves."""

    model_config = ConfigDict(frozen=True)
