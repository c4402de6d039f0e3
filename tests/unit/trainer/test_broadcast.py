"""Weights sent from the trainer's device: over gloo here, as over NCCL between GPUs."""

from __future__ import annotations

import inspect
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from services.trainer import transfer
from services.trainer.processes.launcher import rank_environment
from services.trainer.publishing import Publisher
from services.trainer.transfer import Broadcast, Member, chunks, join_group, location, share
from services.trainer.zero.models import checkpoint_tensors, model_tensors
from shared.errors import BadRequest, Conflict
from shared.settings import Settings
from shared.weights.folders import stored_tensors, tensor_digests
from shared.wire import BroadcastWeights, PublishRequest
from tests.support.tiny_experts import KINDS, make_tiny_experts
from tests.support.tiny_models import make_tiny_model

PATIENT = timedelta(seconds=30)
TENSORS = {
    "embed": torch.arange(12, dtype=torch.float32).view(3, 4),
    "norm": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "down": torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
}


@pytest.fixture
def sending() -> Iterator[Broadcast]:
    sending = Broadcast(TENSORS, "127.0.0.1", 30.0)
    sending.start()
    yield sending
    sending.stop()


def connected(sending: Broadcast) -> Store:
    """Returns the store on a connection of its own: a wait holds it."""
    client = TCPStore("127.0.0.1", sending.port, is_master=False, timeout=PATIENT)
    return PrefixStore(sending.key, client)


def ask(sending: Broadcast, name: str, num_ranks: int = 1) -> Store:
    """Returns the store of a sampler's own group, once it has asked for one."""
    store = connected(sending)
    number = store.add("asked", 1)
    store.set(f"asked/{number}", f"{name} {num_ranks}")
    return PrefixStore(name, store)


def received(sending: Broadcast, store: Store, rank: int = 1, size: int = 2) -> dict[str, Tensor]:
    group = dist.ProcessGroupGloo(store, rank, size, PATIENT)
    one = torch.ones(1)
    group.allreduce([one], dist.AllreduceOptions()).wait(PATIENT)
    assert one.item() == size
    found: dict[str, Tensor] = {}
    for chunk in sending.layout:
        like = {
            tensor.name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for tensor in chunk
        }
        packed = torch.empty(sum(tensor.nbytes for tensor in like.values()), dtype=torch.uint8)
        group.broadcast([packed], dist.BroadcastOptions()).wait(PATIENT)
        parts = packed.split([tensor.nbytes for tensor in like.values()])
        for (name, tensor), part in zip(like.items(), parts, strict=True):
            found[name] = part.view(tensor.dtype).view(tensor.shape)
    return found


def assert_all(found: dict[str, Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].equal(tensor), name


def test_each_sampler_that_asks_gets_every_tensor(sending: Broadcast) -> None:
    for name in ("first", "second"):
        assert_all(received(sending, ask(sending, name)))


def test_all_ranks_of_a_sampler_get_every_tensor(sending: Broadcast) -> None:
    stores = ask(sending, "two", num_ranks=2), PrefixStore("two", connected(sending))
    with ThreadPoolExecutor(2) as ranks:
        for found in ranks.map(
            lambda rank: received(sending, stores[rank - 1], rank, size=3), (1, 2)
        ):
            assert_all(found)


def test_a_sampler_that_asks_and_does_not_come_fails_none_of_those_behind_it() -> None:
    """They wait until it is given up, and only then begin."""
    sending = Broadcast(TENSORS, "127.0.0.1", 5.0)
    sending.start()
    gone, behind = ask(sending, "gone"), ask(sending, "behind")
    gone.wait(["turn"], PATIENT)
    assert not behind.check(["turn"])
    behind.wait(["turn"], PATIENT)
    assert_all(received(sending, behind))
    sending.stop()


def test_a_group_that_is_never_made_keeps_no_one_waiting() -> None:
    """As NCCL's where a sampler cannot connect to it: it waits without a deadline."""
    hung, made = threading.Event(), list[Member]()

    def hanging_once(member: Member) -> Any:
        made.append(member)
        if len(made) == 1:
            hung.wait()
            raise RuntimeError("it was the last test")
        return join_group(member)

    sending = Broadcast(TENSORS, "127.0.0.1", 30.0, meet_s=5.0, join=hanging_once)
    sending.start()
    ask(sending, "unreached").wait(["turn"], PATIENT)
    behind = ask(sending, "behind")
    behind.wait(["turn"], PATIENT)
    assert_all(received(sending, behind))
    sending.stop()
    assert len(made) == 2
    hung.set()


LISTENING = """
from datetime import timedelta
import psutil, torch
from torch.distributed import HashStore
from services.trainer.transfer import Member, join_group

alone = Member(HashStore(), 1, torch.device("cpu"), "127.0.0.2", timedelta(seconds=30))
group = join_group(alone)
sockets = psutil.Process().net_connections()
print({socket.laddr.ip for socket in sockets if socket.status == "LISTEN"})
"""


def test_a_rank_of_the_launcher_meets_samplers_where_the_trainer_listens() -> None:
    """And not on the interface by which the ranks of one host meet each other."""
    environment = rank_environment(Settings())
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    command = [sys.executable, "-c", LISTENING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "{'127.0.0.2'}\n"


def test_once_stopped_it_sends_to_no_one(sending: Broadcast) -> None:
    sending.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", sending.port), timeout=5).close()


def test_chunks_are_of_one_dtype_and_about_a_size() -> None:
    assert chunks(TENSORS) == [["embed"], ["norm", "down"]]
    assert chunks(TENSORS, max_bytes=12) == [["embed"], ["norm"], ["down"]]
    assert chunks({}) == []


@pytest.fixture
def publisher(tmp_path) -> Publisher:
    settings = Settings(shm_dir=tmp_path / "shm", runs_dir=tmp_path / "runs")
    return Publisher(settings, "a", lambda: {"w": TENSORS["norm"]})


def request(method: str, version: int = 1) -> PublishRequest:
    return PublishRequest(job_id="a", version=version, method=method)


def never(_: Path) -> dict[str, str]:
    raise AssertionError("what is sent is not written")


def test_a_version_is_sent_without_files_and_written_when_they_are_asked_for(publisher) -> None:
    ref = publisher.publish(request("nccl"), 5, never)
    assert isinstance(ref, BroadcastWeights)
    assert [[tensor.name for tensor in chunk] for chunk in ref.chunks] == [["w"]]
    assert ref.size_bytes == TENSORS["norm"].nbytes
    saved: list[Path] = []

    def save(folder: Path) -> dict[str, str]:
        saved.append(folder)
        return transfer.write_tensors({"w": TENSORS["norm"]}, folder / "model.safetensors")

    files = publisher.publish(request("http"), 5, save)
    assert (files.method, files.digest, files.tensors) == ("http", ref.digest, ref.tensors)
    assert [file.path for file in files.files] == ["/weights/a/v1/model.safetensors"]
    assert len(saved) == 1
    publisher.close()


def test_a_later_version_is_hashed_again_and_the_same_one_is_not(publisher, monkeypatch) -> None:
    hashed: list[set[str]] = []
    digests = transfer.digests

    def counting(tensors):
        hashed.append(set(tensors))
        return digests(tensors)

    monkeypatch.setattr(transfer, "digests", counting)
    first, same = (publisher.publish(request("nccl"), 5, never) for _ in range(2))
    assert first.digest == same.digest and first.key != same.key
    TENSORS["norm"].add_(1)
    try:
        later = publisher.publish(request("nccl", 2), 5, never)
    finally:
        TENSORS["norm"].sub_(1)
    publisher.close()
    assert later.digest != first.digest
    assert hashed == [{"w"}] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_whose_experts_are_one_tensor_cannot_be_sent(tmp_path, kind) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_tiny_experts(kind, tmp_path / "model"))
    with pytest.raises(Conflict, match="tensors have another form in training than"):
        model_tensors(model, dict(model.state_dict()))


def test_what_is_sent_of_a_model_is_what_its_checkpoint_has(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "model"))
    # In one buffer, as DeepSpeed has them.
    buffer, begin = torch.empty(sum(p.numel() for p in model.parameters())), 0
    for parameter in model.parameters():
        place = buffer[begin : begin + parameter.numel()].view(parameter.shape)
        begin, parameter.data = begin + parameter.numel(), place.copy_(parameter.data)
    weights = dict(model.state_dict())
    kept = model_tensors(model, weights)
    assert all(kept[name] is weights[name] for name in kept), "none is copied"
    assert checkpoint_tensors(model, weights) == kept
    assert kept.keys() == stored_tensors(tmp_path / "model").keys(), "the tied matrix once"
    assert transfer.digests(kept) == tensor_digests(stored_tensors(tmp_path / "model"))


def test_the_memory_of_a_cpu_cannot_be_shared_as_a_gpus(publisher) -> None:
    with pytest.raises(BadRequest, match="computes on 'cpu'"):
        publisher.publish(request("ipc"), 5, never)
    with pytest.raises(BadRequest):
        share(TENSORS)


LAID_OUT: dict[str, object] = dict.fromkeys(inspect.signature(rebuild_cuda_tensor).parameters, 0)
LAID_OUT |= {
    "storage_handle": b"\x01\xff",
    "storage_size_bytes": 64,
    "storage_offset_bytes": 512,
    "ref_counter_handle": b"\x02",
    "ref_counter_offset": 4,
    "event_handle": b"\x03",
    "event_sync_required": True,
}
PLACE = {
    "handle": "01ff",
    "storage_size_bytes": 64,
    "storage_offset_bytes": 512,
    "ref_counter_handle": "02",
    "ref_counter_offset": 4,
    "event_handle": "03",
    "event_sync_required": True,
}


def test_where_a_storage_lies_is_what_torch_calls_it() -> None:
    """`reduce_tensor` gives what `rebuild_cuda_tensor` takes: held to its signature."""
    assert location(tuple(LAID_OUT.values())) == PLACE


def test_torch_is_asked_once_for_a_storage_however_often_its_tensors_are_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each `reduce_tensor` wraps its storage once more."""
    asked: list[int] = []

    def reduce(tensor: torch.Tensor) -> tuple[None, tuple[object, ...]]:
        asked.append(tensor.data_ptr())
        return None, tuple(LAID_OUT.values())

    monkeypatch.setattr(transfer, "reduce_tensor", reduce)
    buffer, storages = torch.zeros(12), transfer.SharedStorages()
    views = {"a": buffer[:6].view(2, 3), "b": buffer[6:].view(3, 2).T}
    for _ in range(100):
        found = [storages.shared(name, tensor) for name, tensor in views.items()]
    assert len(asked) == 1
    assert [one.model_dump() for one in found] == [
        {"name": "a", "dtype": "float32", "shape": (2, 3), "stride": (3, 1), "offset": 0, **PLACE},
        {"name": "b", "dtype": "float32", "shape": (2, 3), "stride": (1, 2), "offset": 6, **PLACE},
    ]
    storages.shared("c", torch.ones(3))  # freed at once
    storages.shared("d", torch.ones(3))  # another one, though at the same address
    assert len(asked) == 3 and len(storages._known) == 2
