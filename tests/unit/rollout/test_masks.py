"""vLLM's sampling masks as a rollout has them, and the ranks of sampled tokens, counted without a
compiler. vLLM is imported where it is used: every worker of pytest imports the test modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from shared.errors import Failed
from shared.wire import Sampling


def test_masks_are_packed_token_by_token_and_one_that_is_missing_is_an_error():
    from services.rollout.on_vllm.completions import packed

    assert packed([[7, 30], [], [1, 9, 2]], 3) == ([7, 30, 1, 9, 2], [2, 0, 3])
    assert packed([], 0) == ([], [])
    with pytest.raises(Failed, match="vLLM gave 2 sampling masks for 3 tokens, expected one each"):
        packed([[7], [8]], 3)


def vllm_masks(counts: list[int], kept: list[list[int]], vocab_size: int) -> Any:
    """Returns what vLLM's kernel leaves of a step: two ids a row, and a bit for each token."""
    import torch
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    bits_BV = np.zeros((len(kept), vocab_size), dtype=np.uint8)
    for row, ids in zip(bits_BV, kept, strict=True):
        row[ids] = 1
    return SamplingMaskTensors(
        torch.tensor([[*ids, 0, 0][:2] for ids in kept], dtype=torch.int32),
        torch.from_numpy(np.packbits(bits_BV, axis=1, bitorder="little")),
        torch.tensor(counts, dtype=torch.int32),
        vocab_size,
    )


def test_on_a_gpu_a_token_drawn_from_the_whole_vocabulary_has_an_empty_mask(monkeypatch):
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    from services.rollout.on_vllm.inside_executors import leave_out_whole_rows

    monkeypatch.setattr(SamplingMaskTensors, "tolists", SamplingMaskTensors.tolists)
    leave_out_whole_rows()
    step = vllm_masks([1, 10, 3], [[4], list(range(10)), [2, 5, 9]], vocab_size=10)
    lists = step.tolists(np.array([1, 1, 1]))
    assert lists.slice_request(0, 1).token_ids.tolist() == [4]
    assert lists.slice_request(1, 1).token_ids.tolist() == []
    assert lists.slice_request(2, 1).token_ids.tolist() == [2, 5, 9]


def test_beside_masks_vllm_takes_requests_without_a_top_k_and_greedy_ones(monkeypatch):
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.rollout.on_vllm.arguments import start

    asked = SimpleNamespace(return_sampling_mask=True)
    llm = SimpleNamespace(model_config=asked, input_processor=SimpleNamespace(model_config=asked))
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda args, usage_context: llm)
    assert start(cast(Any, SimpleNamespace(return_sampling_mask=True))) is llm
    assert not llm.input_processor.model_config.return_sampling_mask
    assert llm.model_config.return_sampling_mask, "the engine itself still gives masks"


@pytest.mark.parametrize(
    ("options", "truncates"),
    [
        ({}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.05}, True),
        ({"top_k": 5, "temperature": 0}, False),
    ],
)
def test_sampling_knows_whether_it_truncates(options, truncates):
    assert Sampling(**options).truncates is truncates


@pytest.mark.parametrize("row_by_row", [True, False])
def test_a_rank_counts_the_tokens_that_are_as_likely_or_more(
    monkeypatch: pytest.MonkeyPatch, row_by_row: bool
) -> None:
    from services.rollout.on_vllm import inside_executors as ranks

    monkeypatch.setattr(ranks, "FEW", 0 if row_by_row else ranks.FEW)
    logprobs_BV = torch.tensor([[-1.0, -3.0, -2.0, -2.0], [-torch.inf, -0.5, -4.0, -1.5]])
    sampled_B1 = torch.tensor([[-2.0], [-0.5]])
    with torch.inference_mode():
        found_B = ranks.count_at_least(logprobs_BV, sampled_B1)
    assert found_B.tolist() == [3, 1] and found_B.dtype == torch.int64
