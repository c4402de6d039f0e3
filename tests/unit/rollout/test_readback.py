"""Weights of a model that is split over several devices, read back whole: layers split as vLLM
does, by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine

HIDDEN, HEAD, VOCAB, PADDED = 8, 2, 10, 16


def check_each_device_reads(
    whole: dict[str, Any],
    size: int,
    part: Callable[[int], Any],
    packed: dict[str, list[str]] | None = None,
) -> None:
    """Reads the parts of a model back in threads, which stand for devices, and compares."""
    import torch

    from services.rollout.on_vllm import inside_worker

    barrier, pieces = threading.Barrier(size, timeout=30), list[Any]([None] * size)

    def read(rank: int) -> dict[str, Any]:
        def gather(tensor: Any, dim: int) -> Any:
            pieces[rank] = tensor
            barrier.wait()
            gathered = torch.cat(pieces, dim)
            barrier.wait()
            return gathered

        return dict(inside_worker.tensors(part(rank), packed or {}, gather))

    with ThreadPoolExecutor(size) as devices:
        for read_back in devices.map(read, range(size), timeout=60):
            assert read_back.keys() == whole.keys()
            for name, expected in whole.items():
                assert read_back[name].equal(expected), name


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
    from torch import randn as tensor

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
    check_each_device_reads(whole, size, lambda rank: split(whole, rank, size, kv_heads), packed)


def experts_of(whole: dict[str, Any], rank: int, size: int, kernel: str) -> Any:
    """Returns a mixture's layer of two experts, of inner size 4, as one of `size` devices has it:
    padded to twice that, and with the gate's and the up matrix swapped if its kernel wants that."""
    import torch
    from torch import nn
    from vllm.model_executor.layers.fused_moe import routed_experts, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    method = object.__new__(unquantized_fused_moe_method.UnquantizedFusedMoEMethod)
    nn.Module.__init__(method)
    method.unquantized_backend = UnquantizedMoeBackend[kernel]
    own = 4 // size

    def stacked(part: str) -> Any:
        return torch.stack([whole[f"mlp.experts.{number}.{part}.weight"] for number in range(2)])

    gate, up = (
        nn.functional.pad(stacked(part).chunk(size, 1)[rank], (0, 0, 0, own))
        for part in ("gate_proj", "up_proj")
    )
    swapped = kernel == "FLASHINFER_CUTLASS"
    layer_ = layer(
        routed_experts.RoutedExperts,
        quant_method=method,
        w13_weight=nn.Parameter(torch.cat([up, gate] if swapped else [gate, up], 1)),
        w2_weight=nn.Parameter(
            nn.functional.pad(stacked("down_proj").chunk(size, 2)[rank], (0, own))
        ),
        ckpt_gate_proj_name="gate_proj",
        ckpt_up_proj_name="up_proj",
        ckpt_down_proj_name="down_proj",
        moe_config=SimpleNamespace(
            num_experts=2,
            num_logical_experts=2,
            num_local_experts=2,
            is_act_and_mul=True,
            hidden_dim_unpadded=HIDDEN,
            intermediate_size_per_partition_unpadded=own,
        ),
    )
    model = nn.Module()
    model.mlp, model.mlp.experts = nn.Module(), nn.Module()
    model.mlp.experts.routed_experts = layer_
    return model


def some_experts() -> dict[str, Any]:
    import torch

    shapes = {"gate_proj": (4, HIDDEN), "up_proj": (4, HIDDEN), "down_proj": (HIDDEN, 4)}
    return {
        f"mlp.experts.{number}.{part}.weight": torch.randn(shape)
        for number in range(2)
        for part, shape in shapes.items()
    }


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kernel", ["TRITON", "FLASHINFER_CUTLASS"])
def test_each_expert_is_read_back_whole_from_all_devices(size: int, kernel: str) -> None:
    whole = some_experts()
    check_each_device_reads(whole, size, lambda rank: experts_of(whole, rank, size, kernel))


def test_experts_that_a_kernel_reorders_or_devices_share_are_not_read_back() -> None:
    from services.rollout.on_vllm import inside_worker

    model = experts_of(some_experts(), 0, 1, "FLASHINFER_TRTLLM")
    assert dict(inside_worker.tensors(model, {})) == {}
    model = experts_of(some_experts(), 0, 1, "TRITON")
    model.mlp.experts.routed_experts.moe_config.num_local_experts = 1
    assert dict(inside_worker.tensors(model, {})) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_vllm_packs_for_a_cpu_are_unpacked_to_the_bit(dtype: str) -> None:
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    from services.rollout.on_vllm import inside_worker

    if not current_platform.is_cpu():
        pytest.skip("vLLM packs experts on a CPU only")
    plain = torch.randn(3, 128, 192).to(getattr(torch, dtype))  # 24,576 elements: 15 bits
    packed = _custom_ops.cpu_prepack_moe_weight(plain, "vec")
    assert not packed.equal(plain)
    assert inside_worker.unpacked(packed, "vec").equal(plain)


def test_weights_are_read_back_in_turns_and_hashed_on_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from services.rollout.on_vllm import inside_worker

    whole = some_experts()
    model = experts_of(whole, 0, 1, "TRITON")
    model.mlp.first, model.mlp.last = (layer_norm(number) for number in (1.0, 2.0))
    expected, end = inside_worker.digests(model)
    assert end is None and expected.keys() == {*whole, "mlp.first.weight", "mlp.last.weight"}
    monkeypatch.setattr(inside_worker, "TURN_BYTES", 1)
    begin, turns = 0, []
    while begin is not None:
        found, begin = inside_worker.digests(model, begin)
        assert inside_worker.digests(model, 0, hashes=False)[0] == {}
        turns.append(found)
    assert [len(found) for found in turns] == [6, 1, 1]
    assert {name: digest for found in turns for name, digest in found.items()} == expected


def layer_norm(value: float) -> Any:
    import torch
    from torch import nn

    module = nn.Module()
    module.weight = nn.Parameter(torch.full((HIDDEN,), value))
    return module
