"""How long it takes to move a LoRA adapter of rank 16 from the trainer's memory into the engine,
and how many bytes that is of the whole: the rows of `bench.sync` for `weight_sync = "lora"`.

Once with adapters in the attention layers and once in every linear layer, each of random values in
bfloat16. What counts is the share of bytes, which rank and shapes give: for each matrix 2 x 16 x
(in + out) bytes beside 2 x in x out. It stands beside the share that was found, which has the
configuration and the files' headers too.
"""

from __future__ import annotations

import asyncio
import json
import time
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import Figure
from services.rollout.on_vllm.processes import VllmStarter
from services.rollout.sampler import Sampler
from services.rollout.weights.copies import Copies, Fetcher
from services.trainer.disk.weights import Publisher, Save
from shared.settings import Settings
from shared.weights.folders import CONFIG, PREFIX, WEIGHTS, stored_tensors, tensor_digests
from shared.wire import ModelRequest, PublishRequest, WeightsRef

RANK = 16
LORA_SHARE = 0.01
"""To reach with adapters in the attention layers. In every linear layer of a 0.5B model, whose
layers are small beside its vocabulary, it is 0.018 by arithmetic."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def share_by_shapes(model: Path, targets: tuple[str, ...]) -> float:
    """Returns the elements of the adapter's matrices as a share of the model's."""
    shapes = {name: tensor.shape for name, tensor in stored_tensors(model).items()}
    adapted = [
        RANK * sum(shape)
        for name, shape in shapes.items()
        if name.removesuffix(".weight").rpartition(".")[2] in targets and len(shape) == 2
    ]
    return sum(adapted) / sum(map(prod, shapes.values()))


def saving(model: Path, targets: tuple[str, ...], seed: int) -> Save:
    """Returns what writes a random adapter of the model."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Any:
        return (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)

    tensors = {}
    for name, tensor in stored_tensors(model).items():
        layer = name.removesuffix(".weight")
        if layer != name and layer.rpartition(".")[2] in targets:
            tensors[f"{PREFIX}{layer}.lora_A.weight"] = random(RANK, tensor.shape[1])
            tensors[f"{PREFIX}{layer}.lora_B.weight"] = random(tensor.shape[0], RANK)
    config = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": targets}

    def save(folder: Path) -> dict[str, str]:
        (folder / CONFIG).write_text(json.dumps(config))
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        return tensor_digests(stored_tensors(folder))

    return save


async def measure_adapter(name: str, model: Path, settings: Settings, repeats: int) -> list[Figure]:
    """Returns the figures of adapters of the model in this folder."""
    copies = Copies(settings.shm_dir / ".sampler", Fetcher("http://127.0.0.1:9"))
    sampler = Sampler(VllmStarter(settings), (settings.shm_dir,), copies)
    publisher = Publisher(settings, "bench-lora")
    whole_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    result: list[Figure] = []
    try:
        sampler.open(None)
        spec = ModelRequest(model=str(model), dtype="bfloat16", max_lora_rank=RANK)
        await sampler.put_model(spec)
        version = 0
        for what, targets in (("attention", ATTENTION), ("all-linear", EVERY)):
            rows: list[tuple[float, float, float, int]] = []
            for _ in range(repeats + 1):  # the first one warms up
                version += 1
                save = saving(model, targets, version)
                request = PublishRequest(job_id="bench-lora", version=version, method="lora")
                start = time.monotonic()
                ref = await asyncio.to_thread(publisher.publish, request, 1, save)
                published = time.monotonic()
                serving = await sampler.reload_weights(WeightsRef(ref))
                seconds = published - start, time.monotonic() - published
                rows.append((*seconds, serving.paused_s, ref.size_bytes))
            label = f"{name} lora, rank {RANK}, {what}"
            publish_s, load_s, pause_s, size_bytes = map(median, zip(*rows[1:], strict=True))
            goal = LORA_SHARE if what == "attention" and name != "demo" else None
            result += [
                Figure(f"{label}: publish", publish_s, "s"),
                Figure(f"{label}: load", load_s, "s"),
                Figure(f"{label}: pause", pause_s, "s"),
                Figure(f"{label}: bytes", size_bytes, "B"),
                Figure(
                    f"{label}: bytes of the whole", size_bytes / whole_bytes, "share", goal, "max"
                ),
                Figure(f"{label}: the same by shapes", share_by_shapes(model, targets), "share"),
            ]
    finally:
        await sampler.close()
        publisher.close()
    return result
