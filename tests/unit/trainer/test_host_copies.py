"""Copies of weights and optimizer in host memory: they are what was copied, and lie where the ones
before lay."""

from __future__ import annotations

import pytest

from tests.support.engine_ranks import a_job, an_engine

pytestmark = pytest.mark.engine


def some_tensors():
    import torch

    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(37, generator=generator),
        torch.randn(5, 9, generator=generator).to(torch.bfloat16),
        torch.tensor(7.0),
        torch.zeros(0),
        torch.randn(300, generator=generator, dtype=torch.float64),
    ]


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_a_copy_gives_back_what_was_copied_over_any_blocks(monkeypatch, block_bytes: int):
    from services.trainer.zero import host_memory

    monkeypatch.setattr(host_memory, "BLOCK_BYTES", block_bytes)
    tensors = some_tensors()
    expected = [tensor.clone() for tensor in tensors]
    copies = host_memory.HostCopies(pinned=False)
    kept = [copies.copy(tensor) for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    for copy, tensor in zip(kept, tensors, strict=True):
        copy.restore(tensor)
    assert all(tensor.equal(was) for tensor, was in zip(tensors, expected, strict=True))
    # 148 + 90 + 4 + 0 + 2,400 bytes, each begun at a multiple of 16: 160 + 96 + 16 + 2,400
    assert copies.size_bytes == -(-2672 // block_bytes) * block_bytes


def test_the_next_copies_lie_where_the_ones_before_lay(monkeypatch):
    from services.trainer.zero import host_memory

    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 256)
    copies = host_memory.HostCopies(pinned=False)
    places = []
    for _ in range(3):
        copies.begin()
        made = [copies.copy(tensor) for tensor in some_tensors()]
        places.append([piece.data_ptr() for copy in made for piece in copy.pieces])
    assert places[0] == places[1] == places[2]
    assert len(set(places[0])) == len(places[0])


def places_of_three_steps(job, examples) -> list[list[int]]:
    """Where the blocks of an engine's copies lie after each of three training steps."""
    engine = an_engine(job)
    found = []
    for _ in range(3):
        engine.update(examples, 1e-3)
        blocks = engine._parts.updater.copies._blocks
        found.append([block.data_ptr() for block in blocks])
    engine.close()
    return found


@pytest.mark.parametrize(("minibatches", "num_blocks"), [(2, 1), (1, 0)])
def test_a_step_of_several_allocates_nothing_that_the_one_before_had_not(
    rank, model, examples, minibatches: int, num_blocks: int
):
    job = a_job(model, training={"minibatches": minibatches}, memory={"zero_stage": 2})
    places = rank.call(places_of_three_steps, job, examples)
    assert places[0] == places[1] == places[2]
    assert len(places[0]) == num_blocks
