"""Every way to move weights that needs no GPU: what the engine then computes is what the trainer's
weights give, and what a new engine gives.

One engine for all methods, in this process; the trainer is its publisher and a Hugging Face model
whose weights change at random. torch is imported where it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.orchestrator.samplers import syncing
from services.rollout.on_vllm.processes import VllmStarter
from services.rollout.sampler import Sampler
from services.rollout.weights.copies import Copies, Fetcher
from services.trainer import publishing as published
from services.trainer.publishing import Publisher, published_file
from shared.errors import Failed, StateLost, Unavailable
from shared.job import SyncMethod
from shared.settings import Settings
from shared.wire import (
    AnyWeights,
    Canary,
    Logprobs,
    ModelRequest,
    PublishRequest,
    Sampling,
    SentWeights,
    ServingWeights,
    SharedTensor,
    SharedWeights,
    SleepRequest,
    TokenIds,
    WeightsRef,
)
from tests.support.cut_server import CutServer
from tests.support.safetensors_files import hashing
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

SEQUENCES = np.random.default_rng(0).integers(3, VOCAB_SIZE, (64, 16)).tolist()
CANARY_IDS = TokenIds([(7 * position + 11) % VOCAB_SIZE for position in range(48)])


@dataclass
class Trainer:
    """A Hugging Face model whose weights change, and the real publisher of them."""

    network: Any
    settings: Settings
    publisher: Publisher
    server: CutServer
    version: int = 0
    publish_s: float = 0.0
    keep: dict[str, Any] = field(default_factory=dict)

    def step(self, size: float = 0.02) -> None:
        """Changes a tenth of the elements."""
        import torch

        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.network.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < 0.1
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((size * noise * chosen).to(parameter.device))

    def weights(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self.network.state_dict().items()}

    def load(self, weights: dict[str, Any]) -> None:
        """Has these weights, as a further version."""
        self.version += 1
        self.network.load_state_dict(weights)

    def logprobs(self, ids: list[int]) -> list[float]:
        import torch

        with torch.no_grad():
            ids_BT = torch.tensor([ids], device=self.network.device)
            logprobs_TV = torch.log_softmax(self.network(ids_BT).logits[0].float(), -1)
        return [logprobs_TV[t - 1, ids[t]].item() for t in range(1, len(ids))]

    def publish(self, method: SyncMethod) -> AnyWeights:
        request = PublishRequest(job_id="job", version=self.version, method=method)
        started = time.perf_counter()
        ref = self.publisher.publish(request, 1, hashing(self.network.save_pretrained))
        self.publish_s = time.perf_counter() - started
        ours = Canary(token_ids=CANARY_IDS, logprobs=Logprobs(self.logprobs(list(CANARY_IDS))))
        files = [*getattr(ref, "files", ())]
        files += [step.file for step in getattr(ref, "steps", ())]
        for file in files:
            path = published_file(self.settings, *file.path.split("/")[2:])
            self.server.files[file.path] = path.read_bytes()
        return ref.model_copy(update={"canary": ours})


@dataclass
class Pair:
    trainer: Trainer
    sampler: Sampler

    async def sync(self, method: SyncMethod) -> tuple[AnyWeights, ServingWeights]:
        ref = self.trainer.publish(method)
        serving = await self.sampler.reload_weights(WeightsRef(ref))
        assert (serving.version, serving.digest) == (ref.version, ref.digest)
        return ref, serving

    async def largest_gap(self) -> float:
        """Returns by how much a log-prob of 64 sequences differs at most from the trainer's."""
        engine = await self.sampler.ready_engine()
        gaps = [
            abs(ours - theirs)
            for ids in SEQUENCES
            for ours, theirs in zip(
                self.trainer.logprobs(ids), await engine.logprobs(ids), strict=True
            )
        ]
        return max(gaps)


@contextlib.asynccontextmanager
async def a_pair(
    folder: Path,
    device: str = "cpu",
    *,
    model: Path | None = None,
    dtype: str = "float32",
    transfer_s: float = 5.0,
    **more: Any,
) -> AsyncIterator[Pair]:
    """Yields a trainer with its weights on `device`, and a sampler with further settings. Both have
    `model`, or a tiny one, and wait for each other for `transfer_s`."""
    from transformers import AutoModelForCausalLM

    from services.trainer.zero.models import model_tensors

    # vLLM on a CPU needs heads of 32
    model = model or make_tiny_model(folder / "model", num_heads=2)
    settings = Settings(shm_dir=folder / "shm", runs_dir=folder / "runs", **more)
    environment = dict(os.environ)
    with CutServer().running() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "TRANSFER_S", transfer_s)
        copies = Copies(folder / "copies", Fetcher(server.url))
        roots = (settings.shm_dir, settings.runs_dir)
        sampler = Sampler(VllmStarter(settings), roots, copies)
        try:
            sampler.open(None)
            await sampler.put_model(ModelRequest(model=str(model), dtype=dtype))
            network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
            publisher = Publisher(
                settings, "job", lambda: model_tensors(network, dict(network.state_dict()))
            )
            yield Pair(Trainer(network, settings, publisher, server), sampler)
        finally:
            await sampler.close()
            os.environ.clear()
            os.environ.update(environment)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with a_pair(tmp_path_factory.mktemp("sync")) as pair:
        yield pair


IN_PLACE: tuple[SyncMethod, ...] = ("shm", "disk", "http", "delta", "reload", "nccl")


async def agree(pair: Pair, method: SyncMethod) -> ServingWeights:
    pair.trainer.step()
    ref, serving = await pair.sync(method)
    assert ref.canary and syncing.fault(ref.canary, serving) is None
    assert await pair.largest_gap() < 1e-3
    return serving


@pytest.mark.parametrize("method", IN_PLACE)
async def test_after_each_step_the_engine_computes_as_the_trainer_does(
    pair: Pair, method: SyncMethod
) -> None:
    received = [(await agree(pair, method)).received_bytes for _ in range(2)]
    assert bool(received[0]) == (method in ("http", "delta", "nccl"))
    if method == "delta":
        assert received[1] < 0.5 * received[0]


async def test_the_engine_holds_what_was_published_tensor_by_tensor(pair: Pair) -> None:
    await agree(pair, "shm")
    checked = await pair.sampler.check_weights()
    assert (checked.version, checked.differing, checked.unread) == (pair.trainer.version, (), ())
    assert checked.num_tensors == 26


async def one_tensor_skipped(load: Any, new: Path, old: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(new / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = load_file(old / "model.safetensors")[name]
    await planted(load, new, tensors, save_file)


async def in_the_wrong_tensor(load: Any, new: Path, _: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(new / "model.safetensors")
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up].clone(), tensors[gate].clone()
    await planted(load, new, tensors, save_file)


async def bytes_flipped(load: Any, new: Path, _: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(new / "model.safetensors")
    tensors["model.norm.weight"][3] *= -2
    await planted(load, new, tensors, save_file)


async def planted(load: Any, new: Path, tensors: dict[str, Any], save_file: Any) -> None:
    folder = new.parent / f"{new.name}-planted"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((new / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    await load(folder)


@pytest.mark.parametrize(
    ("fault", "differing"),
    [
        (bytes_flipped, ("model.norm.weight",)),
        (one_tensor_skipped, ("model.layers.1.mlp.down_proj.weight",)),
        (
            in_the_wrong_tensor,
            ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ),
    ],
)
async def test_a_load_that_went_wrong_inside_the_engine_is_caught_by_name(
    pair: Pair, fault: Any, differing: tuple[str, ...]
) -> None:
    await agree(pair, "disk")
    old = Path(pair.trainer.publish("disk").path)  # type: ignore[union-attr]
    engine = await pair.sampler.ready_engine()
    load = engine.load_files
    engine.load_files = lambda folder: fault(load, folder, old)  # type: ignore[method-assign]
    pair.trainer.step(0.1)
    try:
        ref, serving = await pair.sync("disk")
    finally:
        engine.load_files = load  # type: ignore[method-assign]
    assert ref.canary
    assert "the log-probs of the canary differ" in str(syncing.fault(ref.canary, serving))
    found = (await pair.sampler.check_weights()).differing
    assert found == differing
    again = ref.model_copy(update={"again": True})
    healed = await pair.sampler.reload_weights(WeightsRef(again))
    assert syncing.fault(ref.canary, healed) is None
    assert (await pair.sampler.check_weights()).differing == ()


async def test_an_engine_that_sleeps_between_versions_computes_as_the_trainer_does(
    pair: Pair,
) -> None:
    """On a CPU the memory stays, and all else is as on a GPU."""
    for _ in range(2):
        await pair.sampler.sleep(SleepRequest(job_id="job"))
        with pytest.raises(Unavailable, match="sleeps while the trainer has its GPU"):
            await pair.sampler.ready_engine()
        await agree(pair, "shm")


async def test_a_trainer_that_sends_to_no_one_leaves_the_old_weights_serving(pair: Pair) -> None:
    await agree(pair, "shm")
    before = pair.sampler.serving
    old = pair.trainer.logprobs(SEQUENCES[0])
    pair.trainer.step(0.1)
    ref = pair.trainer.publish("nccl")
    pair.trainer.publisher.stop_sending()
    why = r"ConnectionError: port \d+ of 127.0.0.1 cannot be reached: .* refused"
    with pytest.raises(Failed, match=rf"did not send version \d+: {why}") as refused:
        await pair.sampler.reload_weights(WeightsRef(ref))
    assert refused.value.code == "not_met"
    assert pair.sampler.serving == before
    engine = await pair.sampler.ready_engine()
    assert np.abs(np.subtract(await engine.logprobs(SEQUENCES[0]), old)).max() < 1e-3
    await agree(pair, "nccl")


async def test_a_group_that_nothing_ends_is_found_out_in_seconds_while_it_samples(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's is, where one side cannot connect to the other: the trainer never joins."""
    from services.trainer import transfer

    await agree(pair, "shm")
    before, hung = pair.sampler.serving, threading.Event()
    monkeypatch.setattr(transfer, "join_group", lambda member: hung.wait())
    pair.trainer.step(0.1)
    ref = pair.trainer.publish("nccl")
    engine = await pair.sampler.ready_engine()
    loading = asyncio.create_task(pair.sampler.reload_weights(WeightsRef(ref)))
    sampled = 0
    while not loading.done():
        await engine.logprobs(SEQUENCES[0])
        sampled += not loading.done()
    with pytest.raises(Failed, match=r"did not send version \d+: ") as refused:
        await loading
    assert refused.value.code == "not_met"
    assert pair.sampler.serving == before and sampled > 0
    pair.trainer.publisher.stop_sending()
    hung.set()
    monkeypatch.undo()
    await agree(pair, "nccl")


async def test_a_trainer_that_dies_while_it_sends_is_healed_by_files(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers are new, some old and some half: nothing is sampled, until files replace all."""
    from services.trainer import transfer

    def dying(tensor: Any) -> Any:
        if tensor.shape == dying_at.shape and tensor.equal(dying_at):
            raise RuntimeError("killed")
        return as_bytes(tensor)

    await agree(pair, "shm")
    pair.trainer.step(0.1)
    as_bytes = transfer.as_bytes
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1)
    monkeypatch.setattr(transfer, "as_bytes", dying)
    monkeypatch.setattr(transfer.chunks, "__defaults__", (1,))
    dying_at = pair.trainer.network.state_dict()["model.layers.1.mlp.up_proj.weight"]
    ref = pair.trainer.publish("nccl")
    assert isinstance(ref, SentWeights)
    with pytest.raises(Failed, match="failed halfway") as refused:
        await pair.sampler.reload_weights(WeightsRef(ref))
    assert refused.value.code == "not_loaded"
    with pytest.raises(StateLost, match="are unknown"):
        await pair.sampler.ready_engine()
    files = pair.trainer.publish("http")
    assert files.digest == ref.digest
    healed = await pair.sampler.reload_weights(WeightsRef(files))
    assert ref.canary and syncing.fault(ref.canary, healed) is None
    assert (await pair.sampler.check_weights()).differing == ()
    assert await pair.largest_gap() < 1e-3


SHARED = SharedTensor(
    name="w",
    dtype="bfloat16",
    shape=(2, 3),
    stride=(3, 1),
    offset=7,
    handle="01ff",
    storage_size_bytes=64,
    storage_offset_bytes=512,
    ref_counter_handle="02",
    ref_counter_offset=4,
    event_handle="03",
    event_sync_required=True,
)


async def test_memory_of_the_trainer_that_cannot_be_opened_leaves_the_old_weights_serving(
    pair: Pair,
) -> None:
    """There is no GPU here: torch refuses the handle, as between containers."""
    await agree(pair, "shm")
    before = pair.sampler.serving
    files = pair.trainer.publish("nccl")
    assert isinstance(files, SentWeights)
    shared = tuple(
        SHARED.model_copy(update={"name": name, "dtype": "float32", "shape": tuple(tensor.shape)})
        for name, tensor in pair.trainer.network.state_dict().items()
        if name in files.tensors
    )
    common = {name: getattr(files, name) for name in SentWeights.model_fields}
    again = {**common, "version": files.version, "again": True}
    ref = SharedWeights(**again, method="ipc", gpu="GPU-1", shared=shared)
    with pytest.raises(Failed, match=r"did not send version \d+: \w*Error: .*") as refused:
        await pair.sampler.reload_weights(WeightsRef(ref))
    pair.trainer.publisher.stop_sending()
    assert refused.value.code == "not_met"
    assert pair.sampler.serving == before
    assert await pair.largest_gap() < 1e-3


async def test_where_a_tensor_lies_is_said_as_torch_takes_it() -> None:
    """By the names of torch's parameters."""
    import inspect

    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from services.rollout.on_vllm.inside_transfer import arguments

    given = arguments(SHARED.model_dump(mode="json"), 1)
    assert inspect.signature(rebuild_cuda_tensor).bind(*given).arguments == {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size((2, 3)),
        "tensor_stride": (3, 1),
        "tensor_offset": 7,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.bfloat16,
        "storage_device": 1,
        "storage_handle": b"\x01\xff",
        "storage_size_bytes": 64,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"\x02",
        "ref_counter_offset": 4,
        "event_handle": b"\x03",
        "event_sync_required": True,
    }


async def test_a_load_that_did_nothing_is_refused_and_the_next_one_heals(pair: Pair) -> None:
    """It has the label and the digest of the new version, and the weights of the old one."""

    async def nothing(folder: Path) -> None: ...

    await agree(pair, "disk")
    engine = await pair.sampler.ready_engine()
    load, engine.load_files = engine.load_files, nothing  # type: ignore[method-assign]
    pair.trainer.step(0.1)
    try:
        with pytest.raises(Failed, match="of the canary did not change at all") as refused:
            await pair.sync("disk")
    finally:
        engine.load_files = load  # type: ignore[method-assign]
    assert refused.value.code == "not_loaded"
    await agree(pair, "disk")


async def test_seeded_samples_of_more_prompts_than_one_pass_holds_end_no_engine(
    pair: Pair,
) -> None:
    engine = await pair.sampler.ready_engine()
    prompts = np.random.default_rng(1).integers(3, VOCAB_SIZE, (60, 220)).tolist()
    sampling = [Sampling(n=4, max_tokens=8, seed=10 * index) for index in range(len(prompts))]
    await asyncio.gather(
        *(
            engine.sample(prompt, how, owner="", salt="")
            for prompt, how in zip(prompts, sampling, strict=True)
        )
    )
    assert await engine.failure() is None


async def test_a_new_engine_gives_what_the_one_in_place_gave(pair: Pair) -> None:
    await agree(pair, "shm")
    engine = await pair.sampler.ready_engine()
    in_place = [await engine.logprobs(ids) for ids in SEQUENCES]
    ref = pair.trainer.publish("restart").model_copy(update={"again": True})
    serving = await pair.sampler.reload_weights(WeightsRef(ref))
    assert ref.canary and syncing.fault(ref.canary, serving) is None
    anew = [await engine.logprobs(ids) for ids in SEQUENCES]
    assert np.abs(np.array(anew) - np.array(in_place)).max() < 1e-4
    await agree(pair, "shm")  # what was started anew is loaded into in place again


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_twenty_steps_agree_with_the_trainer_and_a_new_engine(pair: Pair) -> None:
    """One engine in place through all steps and methods, and then a new one for each step. Before
    each load that counts, other weights are loaded by the same method: one that does nothing, and
    a delta of the wrong base, would show."""
    engine = await pair.sampler.ready_engine()
    trainer_gaps, new_gaps = dict.fromkeys(IN_PLACE, 0.0), dict.fromkeys(IN_PLACE, 0.0)
    checkpoints: list[dict[str, Any]] = []
    in_place: list[dict[SyncMethod, Any]] = []
    for _ in range(20):
        pair.trainer.step()
        checkpoints.append(pair.trainer.weights())
        trainers = np.array([pair.trainer.logprobs(ids) for ids in SEQUENCES])
        in_place.append({})
        for method in IN_PLACE:
            pair.trainer.step(0.1)
            await pair.sync(method)
            pair.trainer.load(checkpoints[-1])
            ref, serving = await pair.sync(method)
            assert ref.canary and syncing.fault(ref.canary, serving) is None
            if method == "delta":
                assert 0 < serving.received_bytes < ref.size_bytes
            found = np.array(await asyncio.gather(*(engine.logprobs(ids) for ids in SEQUENCES)))
            in_place[-1][method] = found
            trainer_gaps[method] = max(trainer_gaps[method], np.abs(found - trainers).max())
    print("largest gaps to the trainer:", told(trainer_gaps))
    assert max(trainer_gaps.values()) < 1e-3
    for step, (weights, by_method) in enumerate(zip(checkpoints, in_place, strict=True), 1):
        pair.trainer.load(weights)
        await pair.sync("restart")
        anew = np.array(await asyncio.gather(*(engine.logprobs(ids) for ids in SEQUENCES)))
        for method, found in by_method.items():
            new_gaps[method] = max(new_gaps[method], np.abs(found - anew).max())
        print(f"largest gaps to a new engine, after step {step}:", told(new_gaps))
    assert max(new_gaps.values()) < 1e-4


def told(gaps: dict[SyncMethod, float]) -> str:
    return ", ".join(f"{method} {gap:.1e}" for method, gap in gaps.items())
