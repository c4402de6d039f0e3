"""Which sequences are computed together: by hand, and as properties of any sequences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.trainer_ranks import BATCHES, MIN_USEFUL, useful_share
from services.trainer.learning import forest
from services.trainer.learning.forest import _Load, cost, pack_padded, pack_shared


def test_a_tokens_cost_grows_with_the_tokens_before_it():
    # 16384 tokens cost twice their number; 4096 cost 4096 + 4096 / 4.
    assert (cost(16384), cost(4096)) == (32768, 5120)
    # Tokens 4096 to 8192 attend to the first 4096 as well: 4096 + (8192^2 - 4096^2) / 16384.
    assert cost(8192, 4096) == cost(8192) - cost(4096) == 4096 + 3072


def test_padded_micro_batches_are_filled_first_and_dealt_to_the_ranks_then():
    # By length: 9 7 5 4 2. Budget 14: 9 | 7 5 | 4 2, three micro-batches, so two rounds on two
    # ranks, which have room for four. The smallest budget with at most four is 9: 9 | 7 | 5 | 4 2.
    # By cost: 9, 4 2 (two rows of 4), 7, 5.
    assert pack_padded([5, 9, 2, 7, 4], 2, 14) == [[[1], [3]], [[4, 2], [0]]]
    assert pack_padded([], 2, 14) == [[], []]
    assert pack_padded([3], 2, 14) == [[[0]], [[]]]


def test_a_group_stays_together_where_that_takes_the_least_time():
    # Two groups of two: prompts of 100 and 80, completions of 10. One rank has room for all.
    lengths, shared = [110, 110, 90, 90], [0, 100, 0, 80]
    assert pack_shared(lengths, shared, 1, 1000) == [[[0, 1, 2, 3]]]
    assert pack_shared(lengths, shared, 2, 1000) == [[[0, 1]], [[2, 3]]]
    # 120 + 100 tokens do not fit into 130.
    assert pack_shared(lengths, shared, 1, 130) == [[[0, 1], [2, 3]]]


def test_a_group_is_cut_where_the_other_rank_would_wait_too_long():
    # One group of four: a prompt of 20, completions of 1000. The prompt is computed twice.
    assert pack_shared([1020] * 4, [0, 20, 20, 20], 2, 16384) == [[[0, 1]], [[2, 3]]]
    # To compute a prompt of 4000 again costs more than it saves: one rank waits.
    assert pack_shared([4010] * 2, [0, 4000], 2, 4096) == [[[0, 1]], [[]]]


def test_a_prefix_is_computed_again_before_its_keys_are_gathered_too_often():
    # 20 sequences of 101 tokens, 100 of them shared: 120 distinct tokens, and 2,020 keys. With a
    # budget of 125 at most 8 x 125 = 1,000 keys, those of 9 sequences.
    ((first, *others),) = pack_shared([101] * 20, [0] + [100] * 19, 1, 125)
    assert (len(first), [len(batch) for batch in others]) == (9, [9, 2])


@pytest.mark.parametrize(
    ("length", "budget", "num_ranks"), [(51, 100, 1), (9_500, 16_384, 8), (6_300, 16_384, 1)]
)
def test_the_number_of_rounds_is_found_in_few_tries(monkeypatch, length, budget, num_ranks):
    tries, fitted = [], forest._fitted
    monkeypatch.setattr(forest, "_fitted", lambda *given: (tries.append(1), fitted(*given))[1])
    lengths = [length + number % 7 for number in range(4_000)]
    ranks = pack_shared(lengths, [0] * 4_000, num_ranks, budget)
    assert len(tries) < 20
    fit = budget // max(lengths)
    assert len(ranks[0]) == -(-4_000 // (fit * num_ranks))


def test_the_time_to_plan_grows_with_the_number_of_sequences(monkeypatch):
    """Micro-batches without room for further keys have the least work, so they are tried first, for
    each of the short sequences."""
    fits, tried = _Load.fits, list[int]()

    def counted(self: _Load, other: _Load, budget_tokens: int) -> bool:
        tried.append(1)
        return fits(self, other, budget_tokens)

    monkeypatch.setattr(_Load, "fits", counted)

    def tries(num: int) -> int:
        tried.clear()
        pack_shared(
            [32] * 16 * num + [1] * 10 * num, ([0] + [32] * 15) * num + [0] * 10 * num, 2, 64
        )
        return len(tried)

    assert tries(400) < 3 * tries(200)  # without a limit, 5 times as many


def test_a_sequence_longer_than_the_budget_is_alone():
    assert pack_shared([50, 3, 4], [0, 0, 0], 1, 10) == [[[0], [1, 2]]]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 49)), max_size=60),
    st.integers(1, 5),
    st.integers(1, 200),
    st.booleans(),
)
def test_each_sequence_is_packed_once_within_the_budget_in_equal_rounds(
    sequences, num_ranks, budget, is_shared
):
    lengths = [length for length, _ in sequences]
    shared = [0] * len(lengths)
    for i in range(1, len(lengths)):
        shared[i] = min(sequences[i][1], lengths[i], lengths[i - 1])
    if is_shared:
        ranks = pack_shared(lengths, shared, num_ranks, budget)
    else:
        ranks = pack_padded(lengths, num_ranks, budget)
    assert sorted(index for rank in ranks for batch in rank for index in batch) == [
        *range(len(lengths))
    ]
    assert len({len(rank) for rank in ranks}) == 1
    for batch in (batch for rank in ranks for batch in rank if len(batch) > 1):
        if is_shared:
            assert num_distinct(batch, lengths, shared) <= budget
        else:
            assert len(batch) * max(lengths[index] for index in batch) <= budget


def num_distinct(batch: list[int], lengths: list[int], shared: list[int]) -> int:
    """Returns the distinct tokens of sequences, each sharing a prefix with the one before it."""
    return sum(lengths[i] - (shared[i] if i - 1 in batch else 0) for i in batch)


@pytest.mark.parametrize("name", BATCHES)
def test_eight_ranks_are_busy(name):
    assert useful_share(BATCHES[name], 8) > MIN_USEFUL
    assert useful_share(BATCHES[name], 8, share=False) > 0.98
