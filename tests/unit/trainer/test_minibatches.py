"""What the loss of an optimizer step is divided by, where only some of the batch has signal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.learning.batch import plan
from services.trainer.learning.loss import Denominators
from shared.errors import BadRequest
from shared.wire import Example, StepTotals
from tests.support.engine_ranks import a_job


def example(length: int, num_sampled: int | None = None) -> Example:
    sampled = () if num_sampled is None else [1] * num_sampled + [0] * (length - num_sampled)
    return Example(prompt_token_ids=(1,), token_ids=(2,) * length, advantage=1.0, sampled=sampled)


def denominators(examples, totals=None, minibatches=1) -> list[Denominators]:
    job = a_job("m", training={"minibatches": minibatches}, sampling={"max_tokens": 40})
    planned = plan(examples, totals, job, rank=0, num_ranks=1, layout="padded")
    return [minibatch.denominators for minibatch in planned]


def test_one_step_is_divided_by_the_batch_as_sampled():
    # 256 rollouts of 10,000 tokens in all; 8 of them, of 3 tokens each, have signal.
    examples = [example(3)] * 8
    assert denominators(examples, StepTotals(num_sequences=256, num_tokens=10_000)) == [
        Denominators(num_sequences=256, num_tokens=10_000, step_tokens=10_000, max_tokens=40)
    ]
    assert denominators(examples) == [Denominators(8, 24, 24, 40)]


def test_each_of_two_steps_has_its_share_by_hand():
    # 10 sequences, 100 tokens; 3 examples of 6 tokens each, 4 of them sampled: shares of 2 and 1.
    totals = StepTotals(num_sequences=10, num_tokens=100)
    first, second = denominators([example(6, num_sampled=4)] * 3, totals, minibatches=2)
    assert first == Denominators(num_sequences=5, num_tokens=50, step_tokens=52, max_tokens=40)
    assert second == Denominators(num_sequences=5, num_tokens=50, step_tokens=48, max_tokens=40)


def test_a_token_weighs_the_same_where_there_are_fewer_examples_than_minibatches():
    totals = StepTotals(num_sequences=8, num_tokens=80)
    (only,) = denominators([example(5)], totals, minibatches=4)
    assert (only.num_sequences, only.num_tokens, only.step_tokens) == (2, 20, 23.75)


@given(
    st.lists(st.integers(1, 30), min_size=6, max_size=20),
    st.integers(1, 6),
    st.integers(0, 50),
    st.integers(0, 500),
)
def test_shares_sum_to_the_batch(lengths, minibatches, more_sequences, more_tokens):
    totals = StepTotals(
        num_sequences=len(lengths) + more_sequences, num_tokens=sum(lengths) + more_tokens
    )
    shares = denominators([example(length) for length in lengths], totals, minibatches)
    assert sum(share.num_sequences for share in shares) == pytest.approx(totals.num_sequences)
    assert sum(share.num_tokens for share in shares) == pytest.approx(totals.num_tokens)
    assert sum(share.step_tokens for share in shares) == pytest.approx(totals.num_tokens)


@pytest.mark.parametrize(
    ("totals", "sentence"),
    [
        ((1, 100), "totals.num_sequences is 1, expected at least 2, as many as the examples have"),
        ((2, 9), "totals.num_tokens is 9, expected at least 10, as many as the examples have"),
    ],
)
def test_totals_below_the_examples_own_are_refused(totals, sentence):
    with pytest.raises(BadRequest, match=sentence):
        denominators([example(5)] * 2, StepTotals(num_sequences=totals[0], num_tokens=totals[1]))
