"""Weights that come from the trainer's device, received by vLLM's weight-transfer engines. Imported
in vLLM's process.

"ipc" is vLLM's own engine. "nccl" is ours, of the same kind: vLLM's own waits without a deadline
for a trainer that does not come or dies, and only runs between GPUs. What is received is loaded
by vLLM in both.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore
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

from shared.meeting import ASKED, TURN, nth_asked, surviving_peers

BACKENDS = {"nccl": "hone_broadcast", "ipc": "ipc"}
"""The names of the engines in vLLM's table."""

TURN_DEADLINES = 2
"""So many deadlines a sampler waits until those before it are served, of whom one may hang."""


@dataclass(frozen=True)
class Outcome:
    """What came of it: `problem` None is all well. Unless `began`, the model is what it was."""

    began: bool = False
    problem: str | None = None


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


class BroadcastEngine(WeightTransferEngine[Meeting, Chunk]):
    """Receives what `services/trainer/transfer/broadcast.py` sends."""

    init_info_cls = Meeting
    update_info_cls = Chunk

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self._timeout = timedelta(seconds=init_info.deadline_s)
        rank = self.parallel_config.rank
        # torch would try a trainer that is gone until the deadline
        socket.create_connection((init_info.host, init_info.port), init_info.deadline_s).close()
        store = PrefixStore(
            init_info.key,
            TCPStore(init_info.host, init_info.port, is_master=False, timeout=self._timeout),
        )
        if rank == 0:
            number = store.add(ASKED, 1)
            store.set(nth_asked(number), f"{init_info.name} {init_info.num_ranks}")
        own = PrefixStore(init_info.name, store)
        own.wait([TURN], TURN_DEADLINES * self._timeout)
        self._group = self._joined(own, rank + 1, init_info.num_ranks + 1)

    def _joined(self, store: Store, rank: int, size: int) -> Any:
        if self.device.type != "cuda":
            return dist.ProcessGroupGloo(store, rank, size, self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with surviving_peers():
            return dist.ProcessGroupNCCL(store, rank, size, options)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

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

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def shutdown(self) -> None:
        if self.device.type == "cuda" and hasattr(self, "_group"):
            self._group.abort()


WeightTransferEngineFactory.register_engine(BACKENDS["nccl"], BroadcastEngine)


def receive(worker: Any, method: str, meeting: dict[str, Any], updates: list[Any]) -> Outcome:
    """Loads what the trainer sends into the worker's model. If that fails on the way, the model
    can be loaded into again, and holds what must not be sampled with."""
    began = False
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=BACKENDS[method]),
        worker.vllm_config,
        worker.device,
        worker.get_model(),
    )
    worker.weight_transfer_engine = engine
    try:
        worker.init_weight_transfer_engine(meeting)
        began = True
        worker.start_weight_update()
        for update in updates:
            worker.update_weights(rebuilt(update) if method == "ipc" else update)
        worker.finish_weight_update()
    except Exception as error:  # of torch, CUDA or vLLM: the service decides what becomes of it
        if began:
            # Layers that got nothing get their weights back; the first error says more.
            with contextlib.suppress(Exception):
                engine.finish_weight_update()
        return Outcome(began, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        worker.weight_transfer_engine = None
        engine.shutdown()
    return Outcome(began=True)


def rebuilt(update: dict[str, Any]) -> dict[str, Any]:
    """Returns the update as vLLM's IPC engine takes it: for each tensor the arguments of torch's
    `rebuild_cuda_tensor`, under its GPU's UUID. The engine fills in its own device."""
    tensors = update["shared"]
    return {
        "names": [tensor["name"] for tensor in tensors],
        "dtype_names": [tensor["dtype"] for tensor in tensors],
        "shapes": [tensor["shape"] for tensor in tensors],
        "ipc_handles": [{update["gpu"]: _arguments(tensor)} for tensor in tensors],
    }


def _arguments(tensor: dict[str, Any]) -> tuple[Any, ...]:
    return (
        torch.Tensor,
        torch.Size(tensor["shape"]),
        tuple(tensor["stride"]),
        tensor["offset"],
        torch.TypedStorage,
        getattr(torch, tensor["dtype"]),
        0,
        bytes.fromhex(tensor["handle"]),
        tensor["storage_size_bytes"],
        tensor["storage_offset_bytes"],
        False,
        bytes.fromhex(tensor["ref_counter_handle"]),
        tensor["ref_counter_offset"],
        bytes.fromhex(tensor["event_handle"]),
        tensor["event_sync_required"],
    )
