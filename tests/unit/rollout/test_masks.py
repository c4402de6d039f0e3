"""vLLM's sampling masks as a rollout has them."""

from dataclasses import replace

import pytest

from services.rollout.on_vllm.masks import Masking, packed
from shared.errors import Failed
from shared.wire import Sampling


def test_masks_are_packed_token_by_token_and_one_that_is_missing_is_an_error():
    assert packed([[7, 30], [], [1, 9, 2]], 3) == ([7, 30, 1, 9, 2], [2, 0, 3])
    assert packed([], 0) == ([], [])
    with pytest.raises(Failed, match="vLLM gave 2 sampling masks for 3 tokens, expected one each"):
        packed([[7], [8]], 3)


def test_what_vllm_wants_with_masks_samples_the_same_tokens():
    on_gpu = Masking(asked=True, vocab_size=64, on_cpu=False)
    greedy = on_gpu.wanted(Sampling(temperature=0, top_p=0.9))
    assert (greedy.temperature, greedy.top_k) == (1.0, 1)
    assert on_gpu.wanted(Sampling(top_p=0.9)) == Sampling(top_p=0.9, top_k=64)
    assert on_gpu.wanted(Sampling(top_k=5)) == Sampling(top_k=5)
    for other in (replace(on_gpu, on_cpu=True), replace(on_gpu, asked=False)):
        assert other.wanted(Sampling(top_p=0.9)) == Sampling(top_p=0.9)


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
