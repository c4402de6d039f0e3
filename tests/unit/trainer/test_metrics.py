"""The step's metrics, worked out by hand, and that no split into micro-batches or ranks changes
them."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from services.trainer.learning.batch import MicroBatch, collate
from services.trainer.learning.correction import CorrectionSettings
from services.trainer.learning.loss import LossInputs
from services.trainer.learning.metrics import StepMetrics
from shared.job import TrainingSpec
from shared.wire import Example, Span
from tests.support.loss_batches import loss_inputs

CPU = torch.device("cpu")
NO_CORRECTION = CorrectionSettings("none", 0.5, 2.0)
SEQUENCES = [([-1.0, -1.0], 1.0), ([-1.0], -1.0), ([-1.0, -1.0], -1.0)]
"""The sampler's log-probs and the advantage of each."""
LOG_RATIOS = [[0.0, 0.5], [-0.5], [0.5, 30.0]]
RATIOS = [1.0, math.exp(0.5), math.exp(-0.5), math.exp(0.5), math.exp(20.0)]


EXAMPLES = [
    Example(
        prompt_token_ids=(1,),
        token_ids=(2,) * len(logprobs),
        old_logprobs=tuple(logprobs),
        advantage=advantage,
    )
    for logprobs, advantage in SEQUENCES
]


def micro_batch(first: int, end: int) -> MicroBatch:
    return collate(EXAMPLES[first:end])


def inputs(first: int, end: int, training: TrainingSpec) -> LossInputs:
    old = [logprobs for logprobs, _ in SEQUENCES[first:end]]
    new = [
        [value + change for value, change in zip(values, changes, strict=True)]
        for values, changes in zip(old, LOG_RATIOS[first:end], strict=True)
    ]
    return loss_inputs(new, old, [advantage for _, advantage in SEQUENCES[first:end]], training)


def measured(
    parts, training: TrainingSpec | None = None, correction=NO_CORRECTION, num_minibatches=1
) -> tuple[float, dict[str, float]]:
    """The metrics of a step whose micro-batches are these parts of `SEQUENCES`, each with a loss of
    0.5 and entropies 0, 1, .."""
    training = training or TrainingSpec()
    metrics = StepMetrics(CPU, training, correction)
    for first, end in parts:
        x = inputs(first, end, training)
        metrics.add(micro_batch(first, end), x, torch.arange(len(x.logprobs_N)), torch.tensor(0.5))
        metrics.add_mismatch(micro_batch(first, end), x.logprobs_N)
    return metrics.reduce(num_minibatches)


def mismatch(
    examples: Sequence[Example], log_w_N: Sequence[float], version: int | None = None
) -> dict[str, float]:
    """The metrics of a step in which the trainer's log-probs of the examples' sampled tokens are
    these above the sampler's -1."""
    metrics = StepMetrics(CPU, TrainingSpec(), NO_CORRECTION, version=version)
    metrics.add(micro_batch(0, 3), inputs(0, 3, TrainingSpec()), torch.ones(5), torch.tensor(0.0))
    metrics.add_mismatch(collate(examples), torch.tensor(log_w_N, dtype=torch.float64) - 1)
    return metrics.reduce()[1]


def test_metrics_are_over_all_tokens_of_all_micro_batches(one_rank):
    loss, values = measured([(0, 1), (1, 3)])
    raw = [*RATIOS[:4], math.exp(30.0)]
    assert loss == 1.0
    assert values == {
        "clip_ratio/low_mean": pytest.approx(1 / 5),
        "clip_ratio/high_mean": pytest.approx(1 / 5),
        "clip_ratio/region_mean": pytest.approx(2 / 5),
        "ratio/mean": pytest.approx(sum(RATIOS) / 5),
        "kl/old_k3": pytest.approx(sum(r - 1 - math.log(r) for r in RATIOS) / 5),
        "entropy": pytest.approx((0 + 1 + 0 + 1 + 2) / 5),
        "mismatch/logprob_diff_mean": pytest.approx(31.5 / 5),
        "mismatch/logprob_diff_max": pytest.approx(30.0),
        "mismatch/ratio_mean": pytest.approx(sum(raw) / 5),
        "mismatch/ratio_max": pytest.approx(math.exp(30.0)),
        "mismatch/k3_kl": pytest.approx(sum(r - 1 - math.log(r) for r in raw) / 5),
        "mismatch/effective_sample_size": pytest.approx(
            sum(raw) ** 2 / (5 * sum(r * r for r in raw))
        ),
        "mismatch/token_mult_prob_error": pytest.approx(
            (1 + 3 * math.exp(0.5) + math.exp(30.0)) / 5
        ),
        "mismatch/out_of_range_fraction": pytest.approx(1 / 5),
        "padding_fraction": pytest.approx(1 / 9),
        "tokens/trained": 5.0,
        "tokens/computed": 8.0,
        "tokens/shared_fraction": 0.0,
        "num_micro_batches": 2.0,
    }


def test_a_dummy_counts_as_a_micro_batch_and_as_nothing_else(one_rank):
    metrics = StepMetrics(CPU, TrainingSpec(), NO_CORRECTION)
    dummy = dataclasses.replace(micro_batch(1, 2), weight=0.0)
    for batch, first, end in ((micro_batch(0, 3), 0, 3), (dummy, 1, 2)):
        x = inputs(first, end, TrainingSpec())
        metrics.add(batch, x, torch.ones(len(x.logprobs_N)), torch.tensor(9.0))
        metrics.add_mismatch(batch, x.logprobs_N)
    loss, values = metrics.reduce()
    assert (loss, values["entropy"], values["num_micro_batches"]) == (9.0, 1.0, 2.0)
    assert values["mismatch/logprob_diff_mean"] == pytest.approx(31.5 / 5)


def test_several_updates_average_over_their_passes_and_mismatch_is_measured_once(one_rank):
    # Two passes over the same two micro-batches: the loss is the mean of the updates', the mismatch
    # that of the first pass.
    metrics = StepMetrics(CPU, TrainingSpec(), NO_CORRECTION)
    for entropy, repeat in ((1.0, 0), (3.0, 1)):
        x = inputs(0, 3, TrainingSpec())
        metrics.add(micro_batch(0, 3), x, torch.full((5,), entropy), torch.tensor(0.5))
        if repeat == 0:
            metrics.add_mismatch(micro_batch(0, 3), x.logprobs_N)
    loss, values = metrics.reduce(num_minibatches=2)
    assert (loss, values["entropy"]) == (0.5, 2.0)
    assert values["mismatch/logprob_diff_mean"] == pytest.approx(31.5 / 5)
    assert values["ratio/mean"] == pytest.approx(sum(RATIOS) / 5)


def test_without_a_mismatch_there_are_no_names_of_it(one_rank):
    metrics = StepMetrics(CPU, TrainingSpec(), NO_CORRECTION)
    metrics.add(micro_batch(0, 3), inputs(0, 3, TrainingSpec()), torch.ones(5), torch.tensor(1.0))
    assert not [name for name in metrics.reduce()[1] if name.startswith("mismatch")]


def test_dual_clip_counts_the_tokens_that_it_holds(one_rank):
    # A = -1 and r = e^0.5 = 1.65, e^20: above 1.5 both, above 3 one.
    for dual_clip, expected in ((1.5, 2 / 5), (3.0, 1 / 5)):
        _, values = measured([(0, 3)], TrainingSpec(dual_clip=dual_clip))
        assert values["clip_ratio/dual_mean"] == pytest.approx(expected)


def test_cispo_counts_bounded_weights_of_positive_advantages_as_trl_and_sapo_none(one_rank):
    # r > 1.28 at three tokens of five, one of them with A > 0.
    _, cispo = measured([(0, 3)], TrainingSpec(loss="cispo"))
    assert {name: value for name, value in cispo.items() if "clip" in name} == {
        "cispo_clip_ratio": pytest.approx(1 / 5)
    }
    _, sapo = measured([(0, 3)], TrainingSpec(loss="sapo", dual_clip=3.0))
    assert not [name for name in sapo if "clip" in name]


def test_the_ratio_is_the_one_that_the_loss_uses(one_rank):
    # gspo: means of the log-ratios are 0.25, -0.5 and 15.25, over 2, 1 and 2 tokens.
    _, values = measured([(0, 3)], TrainingSpec(loss="gspo"))
    assert values["ratio/mean"] == pytest.approx(
        (2 * math.exp(0.25) + math.exp(-0.5) + 2 * math.exp(15.25)) / 5
    )


def test_the_divergence_from_the_reference_is_the_jobs_estimator(one_rank):
    training = TrainingSpec(beta=0.1, kl="k1")
    metrics = StepMetrics(CPU, training, NO_CORRECTION)
    x = dataclasses.replace(inputs(0, 3, training), reference_logprobs_N=torch.full((5,), -2.0))
    metrics.add(micro_batch(0, 3), x, torch.ones(5), torch.tensor(0.0))
    # New log-probs -1, -0.5, -1.5, -0.5 and 29, the last clamped to a difference of 20.
    assert metrics.reduce()[1]["kl"] == pytest.approx((1 + 1.5 + 0.5 + 1.5 + 20) / 5)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (CorrectionSettings("token_tis", 0.0, 2.0), 1 / 5),
        (CorrectionSettings("icepop", 0.7, 5.0), 2 / 5),
        # Products e^0.5, e^-0.5 and e^30.5: the third sequence's two tokens.
        (CorrectionSettings("sequence_mask", 0.0, 3.0), 2 / 5),
    ],
)
def test_out_of_range_is_by_the_corrections_own_weights_and_bounds(one_rank, correction, expected):
    _, values = measured([(0, 3)], correction=correction)
    assert values["mismatch/out_of_range_fraction"] == pytest.approx(expected)


def test_a_small_mismatch_by_hand(one_rank):
    # log w is 0.1, -0.2 and three times 0: k3 is e^0.1 - 1.1 and e^-0.2 - 0.8.
    values = mismatch(EXAMPLES, [0.1, -0.2, 0.0, 0.0, 0.0])
    up, down = math.exp(0.1), math.exp(-0.2)
    assert values["mismatch/k3_kl"] == pytest.approx((up - 1.1 + down - 0.8) / 5)
    assert values["mismatch/token_mult_prob_error"] == pytest.approx((up + 1 / down + 3) / 5)
    assert values["mismatch/effective_sample_size"] == pytest.approx(
        (up + down + 3) ** 2 / (5 * (up**2 + down**2 + 3))
    )


def test_tokens_whose_sampler_no_one_measured_are_left_out_of_the_mismatch(one_rank):
    # log w is 0.1 and -0.2 over the two tokens that are known; the other three are not.
    known = Example(prompt_token_ids=(1,), token_ids=(2, 2), old_logprobs=(-1, -1), advantage=1)
    unknown = Example(prompt_token_ids=(1,), token_ids=(2,) * 3, advantage=1)
    values = mismatch([known, unknown], [0.1, -0.2, 5.0, 5.0, 5.0])
    assert values["mismatch/logprob_diff_mean"] == pytest.approx(0.15)
    assert values["mismatch/logprob_diff_max"] == pytest.approx(0.2)
    assert values["mismatch/ratio_mean"] == pytest.approx((math.exp(0.1) + math.exp(-0.2)) / 2)
    assert values["mismatch/effective_sample_size"] == pytest.approx(
        (math.exp(0.1) + math.exp(-0.2)) ** 2 / (2 * (math.exp(0.2) + math.exp(-0.4)))
    )


def test_each_tokens_staleness_is_by_its_own_version_by_hand(one_rank):
    # Version 7 is trained. Of staleness 0: tokens 2, 3 and 5; of staleness 2: 0 and 1. Token 4
    # is of unknown weights, and what version 7 said of token 5 was not measured.
    mixed = Example(
        prompt_token_ids=(1,),
        token_ids=(2,) * 4,
        old_logprobs=(-1,) * 4,
        spans=(Span(version=5, start=0), Span(version=7, start=2)),
        advantage=1,
    )
    undated = Example(prompt_token_ids=(1,), token_ids=(2,), old_logprobs=(-1,), advantage=1)
    unmeasured = Example(
        prompt_token_ids=(1,), token_ids=(2,), spans=(Span(version=7, start=0),), advantage=1
    )
    values = mismatch([mixed, undated, unmeasured], [0.1, -0.3, 0.02, 0.0, 0.5, 0.9], version=7)
    assert values["staleness/mean"] == pytest.approx((2 + 2 + 0 + 0 + 0) / 5)
    assert (values["staleness/max"], values["staleness/older_fraction"]) == (2.0, 2 / 5)
    assert values["mismatch/older/logprob_diff_mean"] == pytest.approx((0.1 + 0.3) / 2)
    assert values["mismatch/older/k3_kl"] == pytest.approx(
        (math.exp(0.1) - 1.1 + math.exp(-0.3) - 0.7) / 2
    )
    assert values["mismatch/current/logprob_diff_mean"] == pytest.approx(0.02 / 2)
    assert values["mismatch/current/k3_kl"] == pytest.approx((math.exp(0.02) - 1.02) / 2)
    assert values["mismatch/logprob_diff_mean"] == pytest.approx((0.1 + 0.3 + 0.02 + 0.5) / 5)


def test_a_tools_tokens_have_no_staleness(one_rank):
    turns = Example(
        prompt_token_ids=(1,),
        token_ids=(2,) * 3,
        sampled=(1, 0, 1),
        spans=(Span(version=1, start=0), Span(version=2, start=2)),
        advantage=1,
    )
    values = mismatch([turns], [0.0, 0.0], version=2)
    assert (values["staleness/mean"], values["staleness/older_fraction"]) == (0.5, 0.5)


def test_equal_policies_show_no_mismatch(one_rank):
    values = {
        name.removeprefix("mismatch/"): value
        for name, value in mismatch(EXAMPLES, [0.0] * 5).items()
        if "mismatch" in name
    }
    assert values == {
        "logprob_diff_mean": 0.0,
        "logprob_diff_max": 0.0,
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
        "k3_kl": 0.0,
        "effective_sample_size": 1.0,
        "token_mult_prob_error": 1.0,
        "out_of_range_fraction": 0.0,
    }


def test_metrics_do_not_depend_on_the_split(one_rank):
    training = TrainingSpec(loss="gspo", dual_clip=3.0)
    _, whole = measured([(0, 3)], training, CorrectionSettings("sequence_tis", 0.0, 2.0))
    _, parts = measured(
        [(0, 1), (1, 2), (2, 3)], training, CorrectionSettings("sequence_tis", 0.0, 2.0)
    )
    by_split = {
        "num_micro_batches",
        "padding_fraction",
        "entropy",
    }  # these tests' entropies count from 0 in each micro-batch
    assert {k: v for k, v in parts.items() if k not in by_split} == pytest.approx(
        {k: v for k, v in whole.items() if k not in by_split}, rel=1e-12
    )


def test_infinite_log_probs_give_numbers_that_json_has(one_rank):
    metrics = StepMetrics(CPU, TrainingSpec(), NO_CORRECTION)
    infinite = torch.tensor([-math.inf, math.inf, -1.0, -1.0, -1.0])
    metrics.add_mismatch(micro_batch(0, 3), infinite)
    metrics.add(
        micro_batch(0, 3),
        inputs(0, 3, TrainingSpec()),
        torch.tensor([math.nan, 1, 1, 1, 1]),
        torch.tensor(0.0),
    )
    _, values = metrics.reduce()
    assert all(math.isfinite(value) for value in values.values())
    assert values["mismatch/logprob_diff_max"] == 300.0
    assert values["mismatch/effective_sample_size"] == pytest.approx(1 / 5)
    assert "entropy" not in values


def of_two_ranks() -> list[dict[str, float]]:
    """The metrics that each of two ranks reports, which have uneven shares of the sequences."""
    _, values = measured([(0, 1)] if dist.get_rank() == 0 else [(1, 2), (2, 3)])
    each = [values, values]
    dist.all_gather_object(each, values)
    return each


@pytest.mark.engine
def test_two_ranks_report_the_same_numbers_as_one(pools):
    _, alone = pools[1].call(measured, [(0, 1), (1, 2), (2, 3)])
    of_rank = {"num_micro_batches"}
    for values in pools[2].call(of_two_ranks):
        assert {k: v for k, v in values.items() if k not in of_rank} == pytest.approx(
            {k: v for k, v in alone.items() if k not in of_rank}, rel=1e-12
        )
