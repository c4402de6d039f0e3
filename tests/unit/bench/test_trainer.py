"""What both sides of `bench.trainer` are given. That they do the same step is in
`tests/unit/trainer/test_against_trl.py`."""

import pytest

from bench.trainer_side import Task, make_examples

pytestmark = pytest.mark.slow


def test_groups_share_their_prompt_and_lengths_vary_only_if_asked():
    examples = make_examples(Task(vocab_size=1000, num_prompts=3))
    prompts = [example.prompt_token_ids for example in examples]
    assert len(set(prompts)) == 3 and prompts[0] == prompts[7] != prompts[8]
    assert len({len(example.token_ids) for example in examples}) > 12
    same = make_examples(
        Task(vocab_size=1000, num_prompts=2, prompt=(64, 64), completion=128, spread=0)
    )
    assert {(len(example.prompt_token_ids), len(example.token_ids)) for example in same} == {
        (64, 128)
    }
