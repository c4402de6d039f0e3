"""Weights that come from the trainer's device, received by engines of vLLM's weight transfer.
Imported in vLLM's process.

First trainer and sampler meet, in a thread, while the engine samples: what cannot work is found out
before anything changes. Both engines are ours and load by vLLM's code. vLLM's own for NCCL waits
without a deadline for a trainer that does not come or dies, and only runs between GPUs; its own for
IPC opens the trainer's memory when the old weights are already being replaced.
"""

from __future__ import annotations

import contextlib
import math
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

BACKENDS = {"nccl": "hone_broadcast", "ipc": "hone_shared"}
"""The names of the engines in vLLM's table."""

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where the trainer is met, under which name, by a group of how many ranks of the sampler."""

    host: str
    port: int
    key: str
    name: str
    num_ranks: int
    deadline_s: float


@dataclass
class Chunk(WeightTransferUpdateInfo):
    """The tensors that one broadcast brings, packed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass
class Handles(WeightTransferInitInfo):
    """Where each tensor lies in the memory of `gpu`, as `SharedTensor`s in JSON."""

    gpu: str
    shared: list[dict[str, Any]]


@dataclass
class Opened(WeightTransferUpdateInfo):
    """All tensors that were opened."""


class LoadingEngine(WeightTransferEngine[Init, Update]):
    """Loads layer by layer, as vLLM's own engines do. `meet_s` may pass until trainer and sampler
    have met, from `began_at` on, which is set once nobody else is waited for."""

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
    """Receives what `services/trainer/transfer/broadcast.py` sends."""

    init_info_cls = Meeting
    update_info_cls = Chunk

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self._timeout = timedelta(seconds=init_info.deadline_s)
        self.meet_s = min(MEET_S, init_info.deadline_s)
        rank, size = self.parallel_config.rank, init_info.num_ranks + 1
        # torch would try a trainer that is gone until the deadline
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
        torch.cuda.set_device(self.device)  # this thread has chosen none yet
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


class SharedEngine(LoadingEngine[Handles, Opened]):
    """Reads the tensors that `services/trainer/transfer/sharing.py` shares, where they are."""

    init_info_cls = Handles
    update_info_cls = Opened

    def init_transfer_engine(self, init_info: Handles) -> None:
        self.began_at = time.monotonic()
        self._weights = [
            (tensor["name"], rebuild_cuda_tensor(*arguments(tensor, self.device.index or 0)))
            for tensor in init_info.shared
        ]

    def receive_weights(self, update_info: Opened) -> None:
        model: Any = self.model
        model.load_weights(self._weights)

    def shutdown(self) -> None:
        self._weights = []


WeightTransferEngineFactory.register_engine(BACKENDS["nccl"], BroadcastEngine)
WeightTransferEngineFactory.register_engine(BACKENDS["ipc"], SharedEngine)


class Incoming:
    """A version that `worker` is to receive: begins to meet the trainer, in a thread. What hangs
    there is left behind, for nothing ends a NCCL group that is being made."""

    def __init__(self, worker: Any, method: str, meeting: dict[str, Any]) -> None:
        self._worker = worker
        self._engine: Any = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=BACKENDS[method]),
            worker.vllm_config,
            worker.device,
            worker.get_model(),
        )
        self._meeting = meeting
        self._problem: str | None = None
        self._deciding = threading.Lock()
        threading.Thread(target=self._meet, daemon=True).start()

    def _meet(self) -> None:
        engine = self._engine
        try:
            engine.init_transfer_engine(engine.parse_init_info(self._meeting))
            found = ""
        except Exception as error:  # of torch or CUDA: the service decides what becomes of it
            found = said(error)
        with self._deciding:
            is_late = self._problem is not None
            self._problem = self._problem if is_late else found
        if is_late and not found:  # the trainer and its memory wait for nobody
            engine.shutdown()

    def problem(self) -> str | None:
        """Returns "" once they have met, why they do not, or None while that is to be seen."""
        meet_s = self._engine.meet_s
        with self._deciding:
            if self._problem is None and time.monotonic() > self._engine.began_at + meet_s:
                self._problem = f"trainer and sampler did not meet within {meet_s:g} s"
            return self._problem

    def load(self, updates: list[dict[str, Any]]) -> str | None:
        """Loads what is sent into the worker's model, and returns what went wrong. The model can be
        loaded into again then, and holds what must not be sampled with."""
        worker, engine = self._worker, self._engine
        worker.weight_transfer_engine = engine
        try:
            worker.start_weight_update()
            for update in updates:
                worker.update_weights(update)
            worker.finish_weight_update()
        except Exception as error:  # likewise, or of vLLM
            # Layers that got nothing get their weights back; the first error says more.
            with contextlib.suppress(Exception):
                engine.finish_weight_update()
            return said(error)
        finally:
            worker.weight_transfer_engine = None
            engine.shutdown()
        return None


def address_towards(trainer: tuple[str, int], within_s: float) -> str:
    """Returns the address of this host by which it reaches the trainer's."""
    try:
        with socket.create_connection(trainer, within_s) as connection:
            return connection.getsockname()[0]
    except OSError as error:
        host, port = trainer
        raise ConnectionError(f"port {port} of {host} cannot be reached: {error}") from error


def said(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def arguments(tensor: dict[str, Any], device: int) -> tuple[Any, ...]:
    """Returns a shared tensor as torch's `rebuild_cuda_tensor` takes it, for the GPU that is number
    `device` in this process."""
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
