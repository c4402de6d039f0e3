"""The ranks of sampled tokens, counted without a compiler. vLLM is imported where it is used: every
worker of pytest imports the test modules."""

from __future__ import annotations

import pytest
import torch


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
