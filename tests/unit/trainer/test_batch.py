"""Collating, and the denominators of optimizer steps, by hand."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.learning.batch import collate, plan
from services.trainer.learning.examples import UNKNOWN, allowed_versions, check
from services.trainer.learning.loss import Denominators
from shared.errors import BadRequest
from shared.wire import Example, Logprobs, Span, StepTotals, TokenIds
from tests.support.engine_ranks import a_job


def example(prompt, completion, advantage=1.0) -> Example:
    return Example(
        prompt_token_ids=prompt,
        token_ids=completion,
        old_logprobs=[-1.0] * len(completion),
        advantage=advantage,
    )


def test_collate_points_at_the_states_that_predict_each_completion_token():
    batch = collate(
        [example((5, 6, 7), (8, 9), advantage=2.0), example((1,), (0, 3, 4), advantage=-1.0)]
    )
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9], [1, 0, 3, 4, 0]]
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.rows_N.tolist() == [0, 0, 1, 1, 1]
    assert batch.columns_N.tolist() == [2, 3, 0, 1, 2]
    assert (batch.sequences_N.tolist(), batch.num_sequences) == ([0, 0, 1, 1, 1], 2)
    assert batch.targets_N.tolist() == [8, 9, 0, 3, 4]
    assert batch.advantages_N.tolist() == [2, 2, -1, -1, -1]
    assert batch.lengths_N.tolist() == [2, 2, 3, 3, 3]


def test_a_packed_row_holds_the_sequences_end_to_end_and_positions_begin_again():
    batch = collate(
        [example((5, 6, 7), (8, 9), advantage=2.0), example((1,), (0, 3, 4), advantage=-1.0)],
        layout="packed",
    )
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9, 1, 0, 3, 4]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert batch.attention_mask_BT.tolist() == [[1] * 9]
    assert batch.rows_N.tolist() == [0] * 5
    assert batch.columns_N.tolist() == [2, 3, 5, 6, 7]
    assert batch.targets_N.tolist() == [8, 9, 0, 3, 4]
    assert (batch.sequences_N.tolist(), batch.num_sequences) == ([0, 0, 1, 1, 1], 2)
    assert batch.lengths_N.tolist() == [2, 2, 3, 3, 3]
    assert batch.to(torch.device("cpu")).position_ids_BT is not None


def test_trap_pad_equal_to_eos_masks_neither():
    batch = collate([example((0, 0), (0, 0)), example((0,), (0,))])
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_targets_may_be_other_tokens_than_the_model_reads(layout):
    one = example([7], [8, 9, 5]).model_copy(update={"context_ids": TokenIds([1, 2, 3])})
    batch = collate([one, example([7], [1, 4])], layout=layout)
    assert batch.targets_N.tolist() == [8, 9, 5, 1, 4]
    read = batch.input_ids_BT[batch.rows_N, batch.columns_N].tolist()
    assert read == [7, 1, 2, 7, 1]


def test_a_rank_without_rows_gets_a_dummy_of_weight_zero():
    job, only = a_job("m"), [example((1, 2), (3,))]
    (minibatch,) = plan(only, None, job, rank=1, num_ranks=2, layout="padded")
    batches = minibatch.micro_batches
    assert [batch.to(torch.device("cpu")).weight for batch in batches] == [0.0]
    assert batches[0].advantages_N.tolist() == [0.0]
    assert batches[0].targets_N.numel() == 1


def test_a_conversation_trains_on_what_the_policy_sampled_and_sees_the_rest():
    # Prompt 5 6; the policy says 7 8, a tool answers 20 21, the policy says 9. Targets are 7, 8 and
    # 9, each predicted by the state before it: columns 1, 2 and 5 of 5 6 7 8 20 21 9.
    turns = Example(
        prompt_token_ids=(5, 6),
        token_ids=(7, 8, 20, 21, 9),
        old_logprobs=(-1.0, -2.0, 0.0, 0.0, -3.0),
        sampled=(1, 1, 0, 0, 1),
        advantage=0.5,
    )
    batch = collate([turns, example((1,), (2,), advantage=-1.0)])
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 20, 21, 9], [1, 2, 0, 0, 0, 0, 0]]
    assert batch.targets_N.tolist() == [7, 8, 9, 2]
    assert (batch.rows_N.tolist(), batch.columns_N.tolist()) == ([0, 0, 0, 1], [1, 2, 5, 0])
    assert batch.sampler_logprobs_N.tolist() == [-1, -2, -3, -1]
    assert batch.advantages_N.tolist() == [0.5, 0.5, 0.5, -1]
    assert batch.lengths_N.tolist() == [3, 3, 3, 1]
    packed = collate([example((1,), (2,)), turns], layout="packed")
    assert packed.input_ids_BT.tolist() == [[1, 2, 5, 6, 7, 8, 20, 21, 9]]
    assert (packed.targets_N.tolist(), packed.columns_N.tolist()) == ([2, 7, 8, 9], [0, 3, 4, 7])


def test_advantages_per_token_take_the_place_of_the_examples_one():
    turns = Example(
        prompt_token_ids=(5,),
        token_ids=(7, 8, 9),
        sampled=(1, 0, 1),
        advantage=99.0,
        advantages=(0.25, 0.0, -2.0),
    )
    batch = collate([turns, example((1,), (2,), advantage=3.0)])
    assert batch.advantages_N.tolist() == [0.25, -2.0, 3.0]


def test_log_probs_that_no_one_measured_are_told_from_measured_ones():
    unknown = Example(prompt_token_ids=(1,), token_ids=(2, 3), advantage=1.0)
    batch = collate([unknown, example((1,), (2,))])
    assert batch.measured_N.tolist() == [False, False, True]
    assert batch.sampler_logprobs_N[2].item() == -1.0


def test_the_tokens_that_could_be_sampled_go_with_each_sampled_token():
    # Tokens 7, 20 and 9, of which 20 is a tool's: what could have been there does not matter.
    top_p = Example(
        prompt_token_ids=(5,),
        token_ids=(7, 20, 9),
        sampled=(1, 0, 1),
        advantage=1.0,
        kept_counts=(2, 1, 3),
        kept_ids=(7, 30, 20, 1, 9, 2),
    )
    batch = collate([example((1,), (2, 3)), top_p])
    assert batch.kept is not None
    assert batch.kept.ids_K.tolist() == [7, 30, 1, 9, 2]
    assert batch.kept.tokens_K.tolist() == [2, 2, 3, 3, 3]
    assert collate([example((1,), (2, 3))]).kept is None


def test_each_sampled_token_knows_the_version_that_sampled_it():
    # A tool said token 2; the weights changed from 3 to 4 before token 3.
    mixed = Example(
        prompt_token_ids=(5,),
        token_ids=(7, 8, 9, 10, 11),
        sampled=(1, 1, 0, 1, 1),
        spans=(Span(version=3, start=0), Span(version=4, start=3)),
        advantage=1.0,
    )
    batch = collate([mixed, example((1,), (2, 3))])
    assert batch.versions_N.tolist() == [3, 3, 4, 4, UNKNOWN, UNKNOWN]


def test_no_token_trains_that_is_staler_than_the_job_allows():
    # Step 7 trains version 6; with max_staleness 2 versions 4 to 6 may have sampled.
    allowed = allowed_versions(6, max_staleness=2)
    spans = (Span(version=3, start=0), Span(version=4, start=1))
    check([bad_example(spans=(Span(version=4, start=0), Span(version=6, start=1)))], 64, allowed)
    check([bad_example(spans=spans)], 64, allowed_versions(6, max_staleness=3))
    check([bad_example(spans=spans)], 64, allowed_versions(None, max_staleness=0))
    with pytest.raises(
        BadRequest,
        match="example 0 of 1 has tokens that version 3 sampled, from 0 on; expected versions 4 "
        "to 6",
    ):
        check([bad_example(spans=spans)], 64, allowed)
    with pytest.raises(BadRequest, match="version 7 sampled, from 0 on; expected versions 4 to 6"):
        check([bad_example(spans=(Span(version=7, start=0),))], 64, allowed)
    assert allowed_versions(1, max_staleness=2) == range(2)


def bad_example(**fields) -> Example:
    return Example(**({"prompt_token_ids": (1,), "token_ids": (1, 2), "advantage": 1.0} | fields))


def test_context_may_stand_in_for_the_prompt():
    # rollouts whose prompts differ from the first token on share none
    unshared = bad_example(prompt_token_ids=(), token_ids=(3, 4, 5), sampled=(0, 1, 1))
    check([unshared], vocab_size=64)
    assert collate([unshared]).columns_N.tolist() == [0, 1]
    assert collate([unshared]).targets_N.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (bad_example(prompt_token_ids=()), "has 0 prompt tokens and 2 completion"),
        (
            bad_example(prompt_token_ids=(), sampled=(1, 1)),
            "has 0 prompt tokens and 2 completion tokens; expected at least 1 completion token, "
            "and a token before the first sampled one",
        ),
        (bad_example(token_ids=()), "1 prompt tokens and 0 completion tokens; expected at least 1"),
        (
            bad_example(old_logprobs=(-1.0,)),
            "has 1 old_logprobs, expected 2, one per completion token, or none",
        ),
        (bad_example(advantages=(1.0,)), "has 1 advantages, expected 2"),
        (bad_example(context_ids=(1,)), "has 1 context_ids, expected 2"),
        (bad_example(context_ids=(1, 64)), "token id 64 at context token 1, expected 0 to 63"),
        (bad_example(sampled=(1, 0, 1)), "has 3 sampled, expected 2"),
        (bad_example(sampled=(0, 0)), "has no sampled token among 2, expected at least 1"),
        (bad_example(ratio_mask=(0, 2)), "has ratio_mask 2 at completion token 1, expected 0 or 1"),
        (bad_example(ratio_mask=(0, 0)), "has a ratio_mask that marks no sampled token"),
        (bad_example(ratio_mask=(1, 0), sampled=(0, 1)), "has a ratio_mask that marks no sampled"),
        (bad_example(sampled=(1, 2)), "has sampled 2 at completion token 1, expected 0 or 1"),
        (
            bad_example(token_ids=(63, 64)),
            r"token id 64 at completion token 1, expected 0 to 63 \(the model's vocabulary\)",
        ),
        (bad_example(prompt_token_ids=(-3,)), "token id -3 at prompt token 0, expected 0 to 63"),
        (
            bad_example(old_logprobs=Logprobs(struct.pack("<2f", -1, math.nan))),
            "has old_logprobs nan at completion token 1, expected a finite number",
        ),
        (
            bad_example(old_logprobs=Logprobs(struct.pack("<2f", -math.inf, -1))),
            "has old_logprobs -inf at completion token 0, expected a finite number",
        ),
        (
            bad_example(advantages=Logprobs(struct.pack("<2f", 1, math.inf))),
            "has advantages inf at completion token 1",
        ),
        (bad_example(advantage=-4e38), r"has advantage -4e\+38, expected at most 3\.40282e\+38"),
        (
            bad_example(kept_counts=(1, 2), kept_ids=(1, 2)),
            "has 2 kept_ids, expected 3, the sum of its kept_counts",
        ),
        (
            bad_example(kept_counts=(3, -1), kept_ids=(1, 2)),
            "has kept_counts -1 at completion token 1, expected 0 or more",
        ),
        (
            bad_example(kept_counts=(1, 2), kept_ids=(1, 5, 6)),
            "has completion token 1 outside its own kept_ids",
        ),
        (
            bad_example(kept_counts=(0, 1), kept_ids=(64,)),
            "token id 64 at kept id 0, expected 0 to 63",
        ),
        *(
            (
                bad_example(spans=tuple(Span(version=1, start=start) for start in starts)),
                rf"has spans that start at tokens \[{', '.join(map(str, starts))}\], expected 0 "
                "first, then ascending starts",
            )
            for starts in ((1,), (0, 2), (0, 1, 1))
        ),
    ],
)
def test_an_example_the_model_cannot_take_is_named(bad, sentence):
    with pytest.raises(BadRequest, match=sentence) as raised:
        check([example((1,), (2,)), bad], vocab_size=64)
    assert raised.value.detail.startswith("example 1 of 2")


def test_an_example_beyond_the_models_context_is_named():
    context = bad_example(token_ids=(1, 2, 3, 4), sampled=(1, 1, 0, 0))  # ends beyond it
    check([bad_example(token_ids=(1, 2)), context], 64, window=3)
    long = bad_example(token_ids=(1, 2, 3))
    with pytest.raises(
        BadRequest, match="has 4 tokens up to the last sampled one, expected at most 3"
    ):
        check([long], 64, window=3)
    check([long], 64, window=None)


def test_what_was_not_sampled_may_have_any_log_prob():
    tool = Logprobs(struct.pack("<2f", -1, math.nan))
    check([bad_example(old_logprobs=tool, sampled=(1, 0))], vocab_size=64)


# --- what an optimizer step is divided by, where only some of the batch has signal ---------------


def of_length(length: int, num_sampled: int | None = None) -> Example:
    sampled = () if num_sampled is None else [1] * num_sampled + [0] * (length - num_sampled)
    return Example(prompt_token_ids=(1,), token_ids=(2,) * length, advantage=1.0, sampled=sampled)


def denominators(examples, totals=None, minibatches=1) -> list[Denominators]:
    job = a_job("m", training={"minibatches": minibatches}, sampling={"max_tokens": 40})
    planned = plan(examples, totals, job, rank=0, num_ranks=1, layout="padded")
    return [minibatch.denominators for minibatch in planned]


def test_one_step_is_divided_by_the_batch_as_sampled():
    # 256 rollouts of 10,000 tokens in all; 8 of them, of 3 tokens each, have signal.
    examples = [of_length(3)] * 8
    assert denominators(examples, StepTotals(num_sequences=256, num_tokens=10_000)) == [
        Denominators(num_sequences=256, num_tokens=10_000, step_tokens=10_000, max_tokens=40)
    ]
    assert denominators(examples) == [Denominators(8, 24, 24, 40)]


def test_each_of_two_steps_has_its_share_by_hand():
    # 10 sequences, 100 tokens; 3 examples of 6 tokens each, 4 of them sampled: shares of 2 and 1.
    totals = StepTotals(num_sequences=10, num_tokens=100)
    first, second = denominators([of_length(6, num_sampled=4)] * 3, totals, minibatches=2)
    assert first == Denominators(num_sequences=5, num_tokens=50, step_tokens=52, max_tokens=40)
    assert second == Denominators(num_sequences=5, num_tokens=50, step_tokens=48, max_tokens=40)


def test_a_token_weighs_the_same_where_there_are_fewer_examples_than_minibatches():
    totals = StepTotals(num_sequences=8, num_tokens=80)
    (only,) = denominators([of_length(5)], totals, minibatches=4)
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
    shares = denominators([of_length(length) for length in lengths], totals, minibatches)
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
        denominators([of_length(5)] * 2, StepTotals(num_sequences=totals[0], num_tokens=totals[1]))
