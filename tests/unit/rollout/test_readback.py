"""Weights of a model that is split over several devices, read back whole: layers split as vLLM
does, by hand."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shared.errors import BadRequest

pytestmark = pytest.mark.engine

HIDDEN, HEAD, VOCAB, PADDED = 8, 2, 10, 16


class Devices:
    """Threads in the place of devices."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=30)
        self._parts: list[Any] = [None] * count

    def gather_of(self, rank: int):
        import torch

        def gather(tensor: Any, dim: int) -> Any:
            self._parts[rank] = tensor
            self._barrier.wait()
            whole = torch.cat(self._parts, dim)
            self._barrier.wait()
            return whole

        return gather


def layer(kind: type, **attributes: Any) -> Any:
    from torch import nn

    made = object.__new__(kind)
    nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def split(whole: dict[str, Any], rank: int, size: int, kv_heads: int) -> Any:
    """Returns the model's part on one of `size` devices: 4 heads, of which each device has its
    share, and `kv_heads` of keys and values, of which it has its share or a copy of one."""
    import torch
    from torch import nn
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    def rows(tensor: Any, part: int = rank, count: int = size) -> Any:
        return tensor.chunk(count)[part]

    copies = max(1, size // kv_heads)
    q, k, v = (whole[f"attn.{name}_proj.weight"] for name in "qkv")
    own_kv = [rows(tensor, rank // copies, size // copies) for tensor in (k, v)]
    qkv = torch.cat([rows(q), *own_kv])
    gate, up = (whole[f"mlp.{name}_proj.weight"] for name in ("gate", "up"))
    embedded = nn.functional.pad(whole["embed.weight"], (0, 0, 0, PADDED - VOCAB))
    model = nn.Module()
    model.embed = layer(VocabParallelEmbedding, weight=rows(embedded), org_vocab_size=VOCAB)
    model.attn, model.mlp = nn.Module(), nn.Module()
    model.attn.qkv_proj = layer(
        QKVParallelLinear,
        weight=qkv,
        bias=None,
        tp_size=size,
        num_kv_head_replicas=copies,
        output_sizes=[len(q), len(own_kv[0]) * size, len(own_kv[1]) * size],
    )
    model.mlp.gate_up_proj = layer(
        MergedColumnParallelLinear,
        weight=torch.cat([rows(gate), rows(up)]),
        bias=torch.cat([rows(whole["mlp.gate_proj.bias"]), rows(whole["mlp.up_proj.bias"])]),
        tp_size=size,
        output_sizes=[len(gate), len(up)],
    )
    model.mlp.down_proj = layer(
        RowParallelLinear,
        weight=whole["mlp.down_proj.weight"].chunk(size, dim=1)[rank],
        bias=whole["mlp.down_proj.bias"],
        tp_size=size,
        output_size=HIDDEN,
    )
    model.mlp.router = layer(
        ReplicatedLinear, weight=whole["mlp.router.weight"], bias=None, tp_size=size, output_size=4
    )
    model.norm = nn.Module()
    model.norm.weight = nn.Parameter(whole["norm.weight"])
    return model


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 2), (2, 4), (4, 2), (4, 1)])
def test_each_device_reads_the_whole_tensors_back(size: int, kv_heads: int) -> None:
    import torch

    from services.rollout.on_vllm.inside import readback

    def tensor(*shape: int) -> Any:
        return torch.randn(shape)

    whole = {
        "embed.weight": tensor(VOCAB, HIDDEN),
        "attn.q_proj.weight": tensor(4 * HEAD, HIDDEN),
        "attn.k_proj.weight": tensor(kv_heads * HEAD, HIDDEN),
        "attn.v_proj.weight": tensor(kv_heads * HEAD, HIDDEN),
        "mlp.gate_proj.weight": tensor(12, HIDDEN),
        "mlp.gate_proj.bias": tensor(12),
        "mlp.up_proj.weight": tensor(12, HIDDEN),
        "mlp.up_proj.bias": tensor(12),
        "mlp.down_proj.weight": tensor(HIDDEN, 12),
        "mlp.down_proj.bias": tensor(HIDDEN),
        "mlp.router.weight": tensor(4, HIDDEN),
        "norm.weight": tensor(HIDDEN),
    }
    packed = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    devices = Devices(size)
    found: list[dict[str, Any]] = [{} for _ in range(size)]

    def read(rank: int) -> None:
        model = split(whole, rank, size, kv_heads)
        found[rank] = dict(readback.tensors(model, packed, devices.gather_of(rank)))

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for read_back in found:
        assert read_back.keys() == whole.keys()
        for name, expected in whole.items():
            assert read_back[name].equal(expected), name


def test_more_devices_than_there_are_is_one_sentence() -> None:
    from services.rollout.on_vllm.arguments import check_devices

    check_devices(2, 2)
    with pytest.raises(BadRequest, match=r"SIZE is 4, and the sampler sees 2 GPU\(s\)"):
        check_devices(4, 2)
