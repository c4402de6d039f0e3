"""Receives weights from the trainer's device, in vLLM's processes. The service calls
`transfer_spec`.

First trainer and sampler meet, in a thread, while the engine samples. So a transfer that cannot
work fails before anything changes. Then vLLM's own code loads the tensors.

Both transfer engines are Hone's. vLLM's engine for NCCL waits without a deadline for a trainer that
does not come or dies, and needs GPUs. vLLM's engine for IPC opens the trainer's memory only when
the old weights are already being replaced.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from shared.weights.meeting import (
    ASKED,
    MEET_S,
    MEETING_DEADLINES,
    TURN,
    nth_asked,
    surviving_peers,
)
from shared.wire import BroadcastWeights, SharedWeights

BROADCAST, SHARED = "hone_broadcast", "hone_shared"
"""The names of Hone's engines in vLLM's table."""

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


@dataclass
class Meeting(WeightTransferInitInfo):
    """The address of the meeting with the trainer, the sampler's name, and the number of ranks."""

    host: str
    port: int
    key: str
    name: str
    num_ranks: int
    deadline_s: float


@dataclass
class Chunk(WeightTransferUpdateInfo):
    """The tensors of one broadcast, packed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass
class Handles(WeightTransferInitInfo):
    """The location of each tensor in the memory of `gpu`, as `SharedTensor`s in JSON."""

    gpu: str
    shared: list[dict[str, Any]]


@dataclass
class OpenedTensors(WeightTransferUpdateInfo):
    """All tensors that were opened."""


class LoadingEngine(WeightTransferEngine[Init, Update]):
    """Loads layer by layer, as vLLM's own engines do. Trainer and sampler have `meet_s` seconds to
    meet from `began_at`, which is set when this sampler's turn comes."""

    meet_s = MEET_S
    began_at = math.inf

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class BroadcastEngine(LoadingEngine[Meeting, Chunk]):
    """Receives the tensors that the trainer's `transfer.py` broadcasts."""

    init_info_cls = Meeting
    update_info_cls = Chunk

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self._timeout = timedelta(seconds=init_info.deadline_s)
        self.meet_s = min(MEET_S, init_info.deadline_s)
        rank, size = self.parallel_config.rank, init_info.num_ranks + 1
        # Done first, because torch would try until the deadline to reach a trainer that has ended.
        trainer = init_info.host, init_info.port
        own_address = address_towards(trainer, self.meet_s)
        store = PrefixStore(
            init_info.key, TCPStore(*trainer, is_master=False, timeout=self._timeout)
        )
        if rank == 0:
            number = store.add(ASKED, 1)
            store.set(nth_asked(number), f"{init_info.name} {init_info.num_ranks}")
        own = PrefixStore(init_info.name, store)
        own.wait([TURN], MEETING_DEADLINES * self._timeout)
        self.began_at = time.monotonic()
        group = self._joined(own, rank + 1, size, own_address)
        one = torch.ones(1, device=self.device)
        group.allreduce([one], dist.AllreduceOptions()).wait(self._timeout)
        if one.item() != size:
            raise RuntimeError(f"{one.item():g} ranks have met, expected {size}")
        self._group = group

    def _joined(self, store: Store, rank: int, size: int, own_address: str) -> Any:
        if self.device.type != "cuda":
            gloo: Any = dist.ProcessGroupGloo
            own = gloo._Options()
            own._timeout = self._timeout
            own._devices = [gloo.create_device(hostname=own_address)]
            return gloo(store, rank, size, own)
        torch.cuda.set_device(self.device)  # this thread has no device yet
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with surviving_peers():
            return dist.ProcessGroupNCCL(store, rank, size, options)

    def receive_weights(self, update_info: Chunk) -> None:
        dtypes = [getattr(torch, name) for name in update_info.dtypes]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in zip(update_info.shapes, dtypes, strict=True)
        ]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self._group.broadcast([packed], dist.BroadcastOptions()).wait(self._timeout)
        model: Any = self.model
        model.load_weights(
            unpack_tensor(packed, update_info.names, update_info.shapes, dtypes, sizes)
        )

    def shutdown(self) -> None:
        if self.device.type == "cuda" and hasattr(self, "_group"):
            self._group.abort()


class SharedEngine(LoadingEngine[Handles, OpenedTensors]):
    """Reads the tensors in the trainer's memory, which its `transfer.py` shares."""

    init_info_cls = Handles
    update_info_cls = OpenedTensors

    def init_transfer_engine(self, init_info: Handles) -> None:
        self.began_at = time.monotonic()
        self._weights = [
            (tensor["name"], rebuild_cuda_tensor(*arguments(tensor, self.device.index or 0)))
            for tensor in init_info.shared
        ]

    def receive_weights(self, update_info: OpenedTensors) -> None:
        model: Any = self.model
        model.load_weights(self._weights)

    def shutdown(self) -> None:
        self._weights = []


WeightTransferEngineFactory.register_engine(BROADCAST, BroadcastEngine)
WeightTransferEngineFactory.register_engine(SHARED, SharedEngine)


@dataclass(frozen=True)
class TransferSpec:
    """The specification of a transfer from the trainer's device, which the service passes to vLLM's
    processes: the `backend` that receives it, in vLLM's table; where it meets the trainer
    (`Meeting`, `Handles`); and the updates to load, in order (`Chunk`s, `OpenedTensors`). `dtypes`
    are the tensors', by torch's names."""

    backend: str
    meeting: dict[str, Any]
    updates: list[dict[str, Any]]
    dtypes: set[str]


def transfer_spec(ref: BroadcastWeights | SharedWeights, host: str, num_ranks: int) -> TransferSpec:
    """Returns the specification for a sampler of `num_ranks` processes whose trainer is at
    `host`."""
    if isinstance(ref, SharedWeights):
        tensors = [tensor.model_dump(mode="json") for tensor in ref.shared]
        meeting = {"gpu": ref.gpu, "shared": tensors}
        return TransferSpec(SHARED, meeting, [{}], {tensor.dtype for tensor in ref.shared})
    chunks = [
        {
            "names": [tensor.name for tensor in chunk],
            "dtypes": [tensor.dtype for tensor in chunk],
            "shapes": [list(tensor.shape) for tensor in chunk],
        }
        for chunk in ref.chunks
    ]
    meeting = {
        "host": host,
        "port": ref.port,
        "key": ref.key,
        "name": secrets.token_hex(8),
        "num_ranks": num_ranks,
        "deadline_s": ref.deadline_s,
    }
    dtypes = {tensor.dtype for chunk in ref.chunks for tensor in chunk}
    return TransferSpec(BROADCAST, meeting, chunks, dtypes)


class Incoming:
    """A version that `worker` will receive. It meets the trainer in a thread. A thread that hangs
    is abandoned, because nothing ends the creation of a NCCL group."""

    def __init__(
        self,
        worker: Any,
        backend: str,
        meeting: dict[str, Any],
        updates: list[dict[str, Any]],
    ) -> None:
        self._worker = worker
        self._engine: Any = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend),
            worker.vllm_config,
            worker.device,
            worker.get_model(),
        )
        self._meeting = meeting
        self._updates = updates
        self._problem: str | None = None
        self._deciding = threading.Lock()
        threading.Thread(target=self._meet, daemon=True).start()

    def _meet(self) -> None:
        engine = self._engine
        try:
            engine.init_transfer_engine(engine.parse_init_info(self._meeting))
            problem = ""
        except Exception as error:  # errors of torch or CUDA; the service decides how to react
            problem = message_of(error)
        with self._deciding:
            is_late = self._problem is not None
            self._problem = self._problem if is_late else problem
        if is_late and not problem:  # no memory of the trainer may stay in use
            engine.shutdown()

    def problem(self) -> str | None:
        """Returns "" once they have met, why they cannot meet, or None while it is undecided."""
        meet_s = self._engine.meet_s
        with self._deciding:
            if self._problem is None and time.monotonic() > self._engine.began_at + meet_s:
                self._problem = f"trainer and sampler did not meet within {meet_s:g} s"
            return self._problem

    def load(self) -> str | None:
        """Loads the updates into the worker's model, and returns the error as a sentence, or None.
        After an error the model has unknown weights, and another version can be loaded."""
        worker, engine = self._worker, self._engine
        worker.weight_transfer_engine = engine
        try:
            worker.start_weight_update()
            for update in self._updates:
                worker.update_weights(update)
            worker.finish_weight_update()
        except Exception as error:  # errors of torch, CUDA or vLLM
            # Layers that received nothing get their old weights; the first error is kept.
            with contextlib.suppress(Exception):
                engine.finish_weight_update()
            return message_of(error)
        finally:
            worker.weight_transfer_engine = None
            engine.shutdown()
        return None


def address_towards(trainer: tuple[str, int], within_s: float) -> str:
    """Returns the address of this host on the network on which it reaches the trainer."""
    try:
        with socket.create_connection(trainer, within_s) as connection:
            return connection.getsockname()[0]
    except OSError as error:
        host, port = trainer
        raise ConnectionError(f"port {port} of {host} cannot be reached: {error}") from error


def message_of(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def arguments(tensor: dict[str, Any], device: int) -> tuple[Any, ...]:
    """Returns the arguments of torch's `rebuild_cuda_tensor` for a shared tensor, on GPU number
    `device` of this process."""
    return (
        torch.Tensor,
        torch.Size(tensor["shape"]),
        tuple(tensor["stride"]),
        tensor["offset"],
        torch.TypedStorage,
        getattr(torch, tensor["dtype"]),
        device,
        bytes.fromhex(tensor["handle"]),
        tensor["storage_size_bytes"],
        tensor["storage_offset_bytes"],
        False,
        bytes.fromhex(tensor["ref_counter_handle"]),
        tensor["ref_counter_offset"],
        bytes.fromhex(tensor["event_handle"]),
        tensor["event_sync_required"],
    )
