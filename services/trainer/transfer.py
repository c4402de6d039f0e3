"""Moves a version's tensors out of the trainer's device: `Broadcast` sends it to other devices,
`share` lets a sampler read it in the memory of the same GPU, `write_tensors` writes it into a file.

**Broadcast**, by NCCL between GPUs and by gloo between CPUs. Each sampler gets a process group of
its own: this process is rank 0, and the sampler's processes are the other ranks. So a sampler that
is late, dies or hangs does not disturb the others. Samplers are served one after another. They meet
the trainer in one of torch's stores (`shared/weights/meeting.py`).

**Shared memory.** Nothing is sent: a CUDA IPC handle says where a tensor is.

**Files**, in the safetensors format: 8 bytes of length, a JSON header, and the tensors one after
the other. The safetensors library copies every tensor in memory before it writes it, and a digest
would need another reading of the file. Here each block of a tensor is hashed and written while the
processor's cache holds it, several tensors at a time. Tensors of a GPU come through pinned buffers,
which are kept for the next version.

The sampler's side is `services/rollout/on_vllm/inside_transfer.py`, in vLLM's processes.
"""

from __future__ import annotations

import contextvars
import ipaddress
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore
from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

from shared.errors import BadRequest
from shared.host.logs import get_logger
from shared.weights.folders import BLOCK_BYTES, Digest, in_parallel
from shared.weights.meeting import ASKED, MEET_S, TURN, nth_asked, surviving_peers
from shared.wire import SentTensor, SharedTensor

CHUNK_BYTES = 256 << 20
"""Approximate bytes of one broadcast. Both sides need that much memory beside the weights."""

POLL_S = 0.02


@dataclass(frozen=True)
class Member:
    """This process as the first rank of a sampler's group, on `device`, at the address `host`."""

    store: Store
    num_ranks: int
    device: torch.device
    host: str
    timeout: timedelta


class Broadcast:
    """Sends `tensors` to every sampler that asks, from `start` until `stop`. The tensors must not
    change meanwhile. A sampler has `meet_s` seconds to join, and then `deadline_s` for each
    broadcast; otherwise it gets nothing. `join` makes a group."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        host: str,
        deadline_s: float,
        *,
        meet_s: float = MEET_S,
        join: Callable[[Member], Any] | None = None,
    ) -> None:
        self.key = secrets.token_hex(16)
        self.port = 0
        self._tensors = tensors
        self._host = host
        self._timeout = timedelta(seconds=deadline_s)
        self._meet_s = min(meet_s, deadline_s)
        self._join = join or join_group
        self._chunks = chunks(tensors)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def layout(self) -> tuple[tuple[SentTensor, ...], ...]:
        """The tensors of each chunk, in order."""
        return tuple(
            tuple(sent_tensor(name, self._tensors[name]) for name in chunk)
            for chunk in self._chunks
        )

    def start(self) -> None:
        """Listens on a free port, on the trainer's address only."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family)
        self.port = listener.getsockname()[1]
        store = TCPStore(
            self._host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        serve = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=serve, args=(self._serve, PrefixStore(self.key, store)), daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Accepts no further sampler, and returns once the last transfer has ended."""
        self._stopping.set()
        if self._thread is None:
            return
        self._thread.join(3 * self._timeout.total_seconds())
        if self._thread.is_alive():
            get_logger().error("weights are still being sent", port=self.port)

    def leave(self) -> None:
        """Accepts no further sampler, and does not wait."""
        self._stopping.set()

    def _serve(self, store: Store) -> None:
        num_served = 0
        while not self._stopping.wait(POLL_S):
            while num_served < store.add(ASKED, 0) and not self._stopping.is_set():
                num_served += 1
                try:
                    name, num_ranks = store.get(nth_asked(num_served)).decode().split()
                    own = PrefixStore(name, store)
                    own.set(TURN, "")
                    self._send(own, int(num_ranks))
                except (RuntimeError, ValueError, TimeoutError) as error:  # the sampler has ended
                    reason = str(error).splitlines()[0]
                    get_logger().warning("weights not sent", port=self.port, reason=reason)

    @torch.no_grad()
    def _send(self, store: Store, num_ranks: int) -> None:
        device = self._tensors[self._chunks[0][0]].device
        member = Member(store, num_ranks + 1, device, self._host, self._timeout)
        join = self._join  # a thread that hangs here must not keep the tensors alive
        group = run_with_timeout(self._meet_s, lambda: check_group(join, member))
        if device.type == "cuda":
            torch.cuda.set_device(device)  # this thread has no device yet
        try:
            for chunk in self._chunks:
                packed = torch.cat([as_bytes(self._tensors[name]) for name in chunk])
                group.broadcast([packed], dist.BroadcastOptions()).wait(self._timeout)
        finally:
            if device.type == "cuda":
                group.abort()  # a graceful end would wait for a sampler that has ended


def check_group(join: Callable[[Member], Any], member: Member) -> Any:
    """Returns the group once all its ranks have taken part in a first collective."""
    group = join(member)
    one = torch.ones(1, device=member.device)
    group.allreduce([one], dist.AllreduceOptions()).wait(member.timeout)
    if one.item() != member.num_ranks:
        raise RuntimeError(f"{one.item():g} ranks have met, expected {member.num_ranks}")
    return group


def run_with_timeout(seconds: float, act: Callable[[], Any]) -> Any:
    """Returns the result of `act`, which runs in a thread. Raises TimeoutError after `seconds`, and
    leaves the thread behind: making a NCCL group waits for the other ranks without a deadline, and
    nothing ends it."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:  # raised again where the result is waited for
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(f"trainer and sampler did not meet within {seconds:g} s") from error


def join_group(member: Member) -> Any:
    """Returns a process group that is independent of torch's default group."""
    if member.device.type != "cuda":
        return join_gloo_group(member)
    torch.cuda.set_device(member.device)  # this thread has no device yet
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = member.timeout
    with surviving_peers():
        return dist.ProcessGroupNCCL(member.store, 0, member.num_ranks, options)


def join_gloo_group(member: Member) -> Any:
    """Returns a group that listens on the trainer's address. The ranks' own groups listen on the
    loopback (GLOO_SOCKET_IFNAME)."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = member.timeout
    options._devices = [
        gloo.create_default_device()
        if is_everywhere(member.host)
        else gloo.create_device(hostname=member.host)
    ]
    return gloo(member.store, 0, member.num_ranks, options)


def is_everywhere(host: str) -> bool:
    """Returns whether a service that listens on `host` listens on every address."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def chunks(tensors: Mapping[str, Tensor], max_bytes: int = CHUNK_BYTES) -> list[list[str]]:
    """Returns the names in order, in chunks. A chunk has one dtype, so that each tensor begins at a
    multiple of its element's size. A tensor of more than `max_bytes` is a chunk of its own."""
    chunks_so_far: list[list[str]] = []
    size_bytes = 0
    for name, tensor in tensors.items():
        fits = chunks_so_far and size_bytes + tensor.nbytes <= max_bytes
        if not fits or tensors[chunks_so_far[-1][0]].dtype != tensor.dtype:
            chunks_so_far.append([])
            size_bytes = 0
        chunks_so_far[-1].append(name)
        size_bytes += tensor.nbytes
    return chunks_so_far


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def sent_tensor(name: str, tensor: Tensor) -> SentTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SentTensor(name=name, dtype=dtype, shape=tuple(tensor.shape))


def gpu_of(device: torch.device) -> str | None:
    """Returns the UUID of a GPU, which names it in every process; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def share(tensors: Mapping[str, Tensor]) -> tuple[str, tuple[SharedTensor, ...]]:
    """Returns the GPU, and the location of each tensor in its memory. The tensors must not change
    or be freed until the sampler has read them. Raises BadRequest on a CPU."""
    device = next(iter(tensors.values())).device
    gpu = gpu_of(device)
    if gpu is None:
        raise BadRequest(
            "a sampler can read the weights only in a GPU's memory, and the trainer computes on "
            f'{str(device)!r}; expected weight_sync "shm"'
        )
    torch.cuda.synchronize(device)
    return gpu, tuple(STORAGES.shared(name, tensor) for name, tensor in tensors.items())


class SharedStorages:
    """The CUDA IPC handle of each storage that a sampler reads. `reduce_tensor` is called once for
    each storage: every call adds a wrapper with a reference counter and an event to the storage,
    they stay until it is freed, and by estimate a few thousand crash the process."""

    def __init__(self) -> None:
        self._known: dict[StorageWeakRef, dict[str, Any]] = {}

    def shared(self, name: str, tensor: Tensor) -> SharedTensor:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in self._known:
            self._known = {one: at for one, at in self._known.items() if not one.expired()}
            _, args = reduce_tensor(tensor.detach())
            self._known[storage] = location(args)
        return SharedTensor(
            **sent_tensor(name, tensor).model_dump(),
            **self._known[storage],
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )


STORAGES = SharedStorages()


def location(args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the location of a storage: the arguments of torch's `rebuild_cuda_tensor` that
    another process needs from this one."""
    (_, _, _, _, _, _, _, handle, size_bytes, offset_bytes, _, *counter) = args
    counter_handle, counter_offset, event_handle, event_sync_required = counter
    return {
        "handle": handle.hex(),
        "storage_size_bytes": size_bytes,
        "storage_offset_bytes": offset_bytes,
        "ref_counter_handle": counter_handle.hex(),
        "ref_counter_offset": counter_offset,
        "event_handle": event_handle.hex(),
        "event_sync_required": event_sync_required,
    }


# --- files ----------------------------------------------------------------------------------------


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The names of dtypes in safetensors."""

ALIGNMENT = 8
"""The header ends at a multiple of this many bytes, as in the safetensors library."""


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> dict[str, str]:
    """Writes the tensors, of any device, and returns the digest of each. An existing file is
    overwritten in place, in the memory that it has."""
    header, begins = _header(tensors)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.truncate(descriptor, len(header) + sum(sizes.values()))
        _write_all(descriptor, memoryview(header), 0)
        return in_parallel(
            sizes, lambda name: _write(tensors[name], descriptor, len(header) + begins[name])
        )
    finally:
        os.close(descriptor)


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Returns the file's first bytes, and where each tensor begins after them. Tensors of large
    elements come first, so that each begins at a multiple of its element's size."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        begins[name], end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[name], end],
        }
    plain = json.dumps(entries).encode()
    plain += b" " * (-len(plain) % ALIGNMENT)
    return struct.pack("<Q", len(plain)) + plain, begins


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the digest of each tensor, of any device, and writes nothing."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    return in_parallel(sizes, lambda name: _hashed(tensors[name], lambda _: None))


def _write(tensor: Tensor, descriptor: int, offset: int) -> str:
    def write_block(block: memoryview) -> None:
        nonlocal offset
        _write_all(descriptor, block, offset)
        offset += len(block)

    return _hashed(tensor, write_block)


def _hashed(tensor: Tensor, take: Callable[[memoryview], None]) -> str:
    """Returns the tensor's digest; `take` gets its bytes, block by block in order."""
    plain = tensor.detach().contiguous()
    digest = Digest(DTYPES[plain.dtype], tuple(plain.shape))
    for data in _in_host_memory(plain.view(-1).view(torch.uint8)):
        for begin in range(0, len(data), BLOCK_BYTES):
            block = data[begin : begin + BLOCK_BYTES]
            digest.add(block)
            take(block)
    return digest.hex()


def _in_host_memory(plain: Tensor) -> Iterator[memoryview]:
    """Yields the bytes in order; a GPU's bytes come in pieces, each valid until the next one."""
    if plain.device.type == "cpu":
        yield plain.numpy().data
        return
    with STAGING.buffer() as buffer:
        for piece in plain.split(len(buffer)):
            staged = buffer[: len(piece)]
            staged.copy_(piece)
            yield staged.numpy().data


class Staging:
    """Buffers in host memory, one for each thread that writes at the same time, kept until the
    process ends. They are pinned, so that a GPU copies into them directly."""

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self._size_bytes = size_bytes
        self._pinned = pinned
        self._free: SimpleQueue[Tensor] = SimpleQueue()

    @contextmanager
    def buffer(self) -> Iterator[Tensor]:
        """Yields a free buffer, or a new one. No other thread has it meanwhile."""
        try:
            buffer = self._free.get_nowait()
        except Empty:
            buffer = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        try:
            yield buffer
        finally:
            self._free.put(buffer)


STAGING = Staging(16 << 20, pinned=True)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
