"""The step's metrics, worked out by hand."""

import math

import pytest
import torch

from services.trainer.batch import collate
from services.trainer.metrics import StepMetrics
from shared.wire import Example


def test_metrics_are_over_all_tokens_of_all_micro_batches(one_rank):
    metrics = StepMetrics(torch.device("cpu"), clip_low=0.2, clip_high=0.28)
    first = collate([Example(prompt_token_ids=(1, 1, 1), token_ids=(2, 2), old_logprobs=(-1.0, -1.0), advantage=1.0)])
    second = collate(
        [
            Example(prompt_token_ids=(1,), token_ids=(2,), old_logprobs=(-1.0,), advantage=-1.0),
            Example(prompt_token_ids=(1,), token_ids=(2, 2), old_logprobs=(-1.0, -1.0), advantage=-1.0),
        ]
    )
    log_ratios = torch.tensor([0.0, 0.5, -0.5, 0.5, 30.0])
    metrics.add(first, log_ratios[:2] - 1, torch.tensor([1.0, 2.0]), torch.tensor(0.25))
    metrics.add(second, log_ratios[2:] - 1, torch.tensor([3.0, 3.0, 1.0]), torch.tensor(0.5))
    metrics.add(collate([first_dummy()], weight=0.0), torch.tensor([-9.0]), torch.tensor([9.0]), torch.tensor(9.0))
    loss, values = metrics.reduce()
    ratios = [1.0, math.exp(0.5), math.exp(-0.5), math.exp(0.5), math.exp(20.0)]
    raw = [*ratios[:4], math.exp(30.0)]
    assert loss == 0.75
    assert values == {
        "clip_fraction/low": pytest.approx(1 / 5),
        "clip_fraction/high": pytest.approx(1 / 5),
        "ratio/mean": pytest.approx(sum(ratios) / 5),
        "kl/old_k3": pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 5),
        "entropy": pytest.approx(10 / 5),
        "mismatch/logprob_diff_mean": pytest.approx(31.5 / 5),
        "mismatch/logprob_diff_max": pytest.approx(30.0),
        "mismatch/k3": pytest.approx(sum(r - 1 - math.log(r) for r in raw) / 5),
        "mismatch/ratio_max": pytest.approx(math.exp(30.0)),
        "padding_fraction": pytest.approx(1 / 11),
        "num_micro_batches": 3.0,
    }


def first_dummy() -> Example:
    return Example(prompt_token_ids=(0,), token_ids=(0,), old_logprobs=(0.0,), advantage=0.0)
