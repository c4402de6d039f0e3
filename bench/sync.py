"""How long it takes to move weights from the trainer's memory into the engine's, by each
method that needs no GPU.

    python -m bench.sync [--quick] [--repeats 3] [--models 0.5B] [--methods shm]

Two models with random weights: one of the shape in `make demo-tiny`, and one of Qwen2.5-0.5B's
(0.99 GB in bfloat16; left out by `--quick`). The trainer's side is its publisher, which writes and
hashes, and its HTTP route; the sampler's is the service's own `Sampler` around a real vLLM engine,
which fetches, proves and loads. No token is sampled meanwhile, so `pause` is the engine's own: from
its last token to its next. `restart`, which takes as long as an engine's start, is left out; `lora`
has an engine of its own (sync_adapter.py).

Beside it the same bytes are copied in memory, once out and once in: what any way through shared
memory takes at least. Figures are medians of the repeats.

Part of each load is vLLM's own: its `reload_weights` of the same files, called directly once per
repeat of `shm`, reads every tensor, copies it into the engine's matrices, and on a CPU packs all of
them for its kernels. The pause is that and a few milliseconds more. The packing alone, by vLLM's
function, of the matrices as they lie in the files, is measured too: on a CPU vLLM keeps a matrix in
no other form, so no way of loading does without it, and none writes into it what is not packed.
What `shm` takes to copying is given with the pause and without, and the latter also in CPU time of
the process of publisher and sampler, which other processes of a busy machine change less. The goal
is for what is Hone's.

For `delta` each step changes every float32 master weight by the learning rate, 1e-6, up or down, as
Adam does about; masters lie anywhere between two bfloat16 numbers, as they do after some training.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from bench.report import Figure, count, finish, repeated
from bench.sync_adapter import measure_adapter
from services.rollout.on_vllm.processes import VllmStarter
from services.rollout.sampler import Sampler
from services.rollout.weights.copies import Copies, Fetcher
from services.trainer.app import create_service
from services.trainer.disk.weights import KEEP_VERSIONS, Publisher
from shared.job import SyncMethod
from shared.settings import Settings
from shared.wire import DeltaWeights, FolderWeights, ModelRequest, PublishRequest, WeightsRef

METHODS: tuple[SyncMethod, ...] = ("shm", "disk", "http", "delta", "reload")

LEARNING_RATE = 1e-6

DEMO_PAUSE_S = 0.1
SHM_COPIES = 3.0
DELTA_SHARE = 0.1

NEW_MEMORY = KEEP_VERSIONS + 2
"""So many versions are published before the first one that is written over an older one."""

SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}


@dataclass
class Model:
    """A model's folder, and its tensors: float32 masters, and the bfloat16 weights that are
    published of them, which a trainer has anyway."""

    folder: Path
    masters: dict[str, Any]
    weights: dict[str, Any]

    def step(self, seed: int) -> None:
        """Changes the masters, and makes the weights of them."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        for name, master in self.masters.items():
            signs = torch.randint(0, 2, master.shape, generator=generator, dtype=torch.int8)
            master.add_(signs.mul_(2).sub_(1), alpha=LEARNING_RATE)
            self.weights[name] = master.to(torch.bfloat16)

    def save(self, folder: Path) -> dict[str, str]:
        """Writes what the trainer would."""
        from services.trainer.disk import tensor_file

        return tensor_file.write(self.weights, folder / "model.safetensors")


def make_model(folder: Path, shape: dict[str, Any]) -> Model:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**shape, max_position_embeddings=256, tie_word_embeddings=True)
    torch.manual_seed(0)
    network = cast(Any, Qwen2ForCausalLM(config)).to(torch.bfloat16)
    network.save_pretrained(folder)
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    masters = {}
    for name, parameter in network.named_parameters():
        master = parameter.detach().float()
        cell = master.abs() * 2.0**-8  # about the distance of two bfloat16 numbers
        masters[name] = master + cell * (torch.rand(master.shape) - 0.5)
    return Model(folder, masters, {})


@contextmanager
def trainer_at(settings: Settings) -> Iterator[str]:
    """Serves the trainer's HTTP routes in a thread; yields their address."""
    unused = cast(Any, None)
    state = cast(Any, type("View", (), {"state": staticmethod(lambda: unused)}))
    server = create_service(settings, state, unused, {}).server(0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@dataclass(frozen=True)
class Plan:
    """By which methods each model's weights are moved, and how often."""

    methods: tuple[SyncMethod, ...]
    repeats: int


@dataclass(frozen=True)
class Measured:
    """Seconds for publishing and for loading, the pause among the latter, and bytes: the bytes
    moved, and the bytes of the whole version. `cpu_s` are CPU seconds of this process for both, and
    `copy_cpu_s` CPU seconds of copying as many bytes in `copy_s`; `vllm_s` is vLLM's part of the
    load, and `pack_s` of that the packing of matrices. `changed` is a delta's share of elements."""

    publish_s: float
    load_s: float
    cpu_s: float
    pause_s: float
    moved_bytes: int
    whole_bytes: int
    changed: float | None
    vllm_s: float = 0.0
    pack_s: float = 0.0
    copy_s: float = 0.0
    copy_cpu_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.publish_s + self.load_s


async def sync_once(
    method: SyncMethod, version: int, model: Model, publisher: Publisher, sampler: Sampler
) -> Measured:
    request = PublishRequest(job_id="bench", version=version, method=method)
    start, cpu_before = time.monotonic(), time.process_time()
    ref = await asyncio.to_thread(publisher.publish, request, 1, model.save)
    published = time.monotonic()
    serving = await sampler.reload_weights(WeightsRef(ref))
    load_s, cpu_s = time.monotonic() - published, time.process_time() - cpu_before
    changed = None
    if isinstance(ref, DeltaWeights) and ref.steps:
        changed = ref.steps[-1].num_changed / ref.steps[-1].num_elements
    found = Measured(
        published - start,
        load_s,
        cpu_s,
        serving.paused_s,
        serving.received_bytes or ref.size_bytes,
        ref.size_bytes,
        changed,
    )
    if not (isinstance(ref, FolderWeights) and method == "shm"):
        return found
    vllm_s = await reload_by_vllm(sampler, ref.path)
    packed_s = await asyncio.to_thread(pack_s, Path(ref.path))
    copied_s, copied_cpu_s = await asyncio.to_thread(copy_s, ref.size_bytes)
    return replace(found, vllm_s=vllm_s, pack_s=packed_s, copy_s=copied_s, copy_cpu_s=copied_cpu_s)


async def reload_by_vllm(sampler: Sampler, folder: str) -> float:
    """Returns the seconds that vLLM's own method takes for files that serve already."""
    engine: Any = await sampler.ready_engine()
    start = time.monotonic()
    await engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    return time.monotonic() - start


async def measure(
    name: str, folder: Path, url: str, settings: Settings, plan: Plan
) -> list[Figure]:
    """Returns the figures of one model."""
    model = await asyncio.to_thread(make_model, folder / name, SHAPES[name])
    copies = Copies(folder / "copies", Fetcher(url))
    roots = (settings.shm_dir, settings.runs_dir)
    sampler = Sampler(VllmStarter(settings), roots, copies)
    publisher = Publisher(settings, "bench")
    found: dict[SyncMethod, list[Measured]] = {}
    version = 0
    try:
        sampler.open(None)
        await sampler.put_model(ModelRequest(model=str(model.folder), dtype="bfloat16"))
        for method in plan.methods:
            found[method] = []
            warm_ups = 1 if version else NEW_MEMORY  # one is also a delta's base
            for _ in range(warm_ups + plan.repeats):
                version += 1
                await asyncio.to_thread(model.step, version)
                found[method].append(await sync_once(method, version, model, publisher, sampler))
    finally:
        await sampler.close()
        publisher.close()
    return figures(name, {m: runs[-plan.repeats :] for m, runs in found.items()})


def copy_s(size_bytes: int) -> tuple[float, float]:
    """Returns the seconds and CPU seconds of copying that many bytes once out and once in."""
    here, between = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    between[:] = here
    start, cpu_before = time.monotonic(), time.thread_time()
    between[:] = here
    here[:] = between
    return time.monotonic() - start, time.thread_time() - cpu_before


def pack_s(folder: Path) -> float:
    """Returns the seconds that vLLM takes to pack all matrices of these files for its kernels."""
    import torch
    from safetensors.torch import load_file
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    seconds = 0.0
    layers: dict[str, torch.nn.Module] = {}
    tensors = load_file(folder / "model.safetensors")
    for _ in range(2):  # the second time into memory that was used before, as in the engine
        start = time.monotonic()
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                layers[name] = torch.nn.Module()
                layers[name].weight = torch.nn.Parameter(tensor, requires_grad=False)
                dispatch_cpu_unquantized_gemm(layers[name], remove_weight=False)
        seconds = time.monotonic() - start
    return seconds


def figures(name: str, found: dict[SyncMethod, list[Measured]]) -> list[Figure]:
    """Returns what is reported of one model."""
    shm = found["shm"]
    result = [
        repeated(f"{name}: memory copied out and in", [run.copy_s for run in shm], "s"),
        repeated(f"{name}: vLLM's own part of a load", [run.vllm_s for run in shm], "s"),
        repeated(f"{name}: of it the packing of matrices", [run.pack_s for run in shm], "s"),
    ]
    for method, runs in found.items():
        label = f"{name} {method}"
        shares = [run.moved_bytes / run.whole_bytes for run in runs]
        pause_goal = DEMO_PAUSE_S if name == "demo" else None
        result += [
            Figure(f"{label}: publish", median(run.publish_s for run in runs), "s"),
            Figure(f"{label}: load", median(run.load_s for run in runs), "s"),
            Figure(f"{label}: pause", median(r.pause_s for r in runs), "s", pause_goal, "max"),
            Figure(f"{label}: bytes", median(run.moved_bytes for run in runs), "B"),
        ]
        if method == "shm" and name != "demo":
            result += to_copying(label, runs)
        if method == "delta":
            changed = median(run.changed or 0.0 for run in runs)
            goal = DELTA_SHARE if name != "demo" else None
            result += [
                Figure(f"{label}: elements changed", changed, "share"),
                Figure(f"{label}: bytes of the whole", median(shares), "share", goal, "max"),
            ]
    return result


def to_copying(label: str, runs: list[Measured]) -> list[Figure]:
    """Returns what publishing and loading takes, as a multiple of copying the same bytes."""
    ours = [(run.total_s - run.pause_s) / run.copy_s for run in runs]
    return [
        repeated(f"{label}: to copying", [run.total_s / run.copy_s for run in runs], "x"),
        repeated(f"{label}: to copying, without the pause", ours, "x", SHM_COPIES, "max"),
        repeated(f"{label}: that in CPU time", [r.cpu_s / r.copy_cpu_s for r in runs], "x"),
        repeated(f"{label}: packing to copying", [run.pack_s / run.copy_s for run in runs], "x"),
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sync")
    parser.add_argument("--quick", action="store_true", help="the tiny model only")
    parser.add_argument("--repeats", type=count, default=3)
    methods = (*METHODS, "lora")
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args(arguments)
    names = ["demo"] if options.quick else options.models
    plan = Plan(tuple(m for m in METHODS if m in ("shm", *options.methods)), options.repeats)
    result: list[Figure] = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hone-bench-") as memory,
        tempfile.TemporaryDirectory(prefix="hone-bench-") as disk,
    ):
        for name in names:
            place = name.replace(".", "-").lower()
            settings = Settings(shm_dir=Path(memory) / place, runs_dir=Path(disk) / place)
            with trainer_at(settings) as url:
                folder = Path(memory) / f"{place}-sampler"
                result += asyncio.run(measure(name, folder, url, settings, plan))
            if "lora" in options.methods:
                result += asyncio.run(
                    measure_adapter(name, folder / name, settings, options.repeats)
                )
    return finish("sync", result, repeats=options.repeats, learning_rate=LEARNING_RATE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
