"""The forest of sequences: its nodes by hand, and a model's log-probs and gradients over random
forests, compared with the same sequences padded."""

import random
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers

from services.trainer.learning import attention, forest
from services.trainer.learning.attention import DenseAttention, node_batches
from services.trainer.learning.batch import collate
from services.trainer.learning.forest import Node, build_forest, sorted_by_tokens
from services.trainer.learning.model_checks import check_head, checkpoint_body, choose_layout
from services.trainer.learning.policy import Policy
from shared.job.running import MemorySpec
from shared.wire import Example, TokenIds

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=24),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=24, layer_types=LAYER_TYPES
    ),
}


def ids(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


@pytest.fixture
def every_prefix(monkeypatch):
    monkeypatch.setattr(forest, "MIN_SAVED", 1)


@pytest.fixture
def gathers(monkeypatch):
    """Has a CPU gather the keys of ancestors, as a GPU in float32 does."""
    monkeypatch.setattr(attention, "parents_of", lambda _: [])


def test_a_group_has_its_prompt_once(every_prefix):
    built = build_forest([ids("ABCDxy"), ids("PQ"), ids("ABCDz")])
    assert built.nodes == (Node(0, 4), Node(4, 2, 4, (0,)), Node(6, 1, 4, (0,)), Node(7, 2))
    assert built.tokens_T.tobytes() == ids("ABCDxyzPQ").tobytes()
    assert built.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 4, 0, 1]
    assert [columns.tolist() for columns in built.columns] == [
        [0, 1, 2, 3, 4, 5],
        [7, 8],
        [0, 1, 2, 3, 6],
    ]
    # A batch per node: the lengths 4 and 2 of the roots, and 2 and 1 of the leaves, differ by more
    # than a quarter.
    assert [
        (batch.queries_BQ.tolist(), batch.keys_BK.tolist()) for batch in node_batches(built)
    ] == [
        ([[0, 1, 2, 3]], [[0, 1, 2, 3]]),
        ([[7, 8]], [[7, 8]]),
        ([[4, 5]], [[0, 1, 2, 3, 4, 5]]),
        ([[6]], [[0, 1, 2, 3, 6]]),
    ]


def test_sequences_may_be_equal_or_a_prefix_of_another(every_prefix):
    built = build_forest([ids("AB"), ids("ABCx"), ids("ABCy"), ids("ABCx")])
    assert built.nodes == (
        Node(0, 2),
        Node(2, 1, 2, (0,)),
        Node(3, 1, 3, (0, 1)),
        Node(4, 1, 3, (0, 1)),
    )
    assert [columns.tolist() for columns in built.columns] == [
        [0, 1],
        [0, 1, 2, 3],
        [0, 1, 2, 4],
        [0, 1, 2, 3],
    ]
    (siblings,) = node_batches(built)[2:]  # x and y are computed together
    assert siblings.queries_BQ.tolist() == [[3], [4]]
    assert siblings.keys_BK.tolist() == [[0, 1, 2, 3], [0, 1, 2, 4]]


def test_a_prefix_is_shared_only_where_that_saves_enough():
    five = [ids("ABCD" + letter) for letter in "vwxyz"]
    assert len(build_forest(five).nodes) == 6  # 4 tokens x 4 sequences are 16
    assert len(build_forest(five[:4]).nodes) == 4  # 4 tokens x 3 sequences are 12
    assert len(build_forest(five, share=False).nodes) == 5
    # All three share 2 tokens, too few for a node; the first two share 22.
    built = build_forest([ids("AB" + 20 * "C" + "x"), ids("AB" + 20 * "C" + "y"), ids("ABz")])
    assert [node.length for node in built.nodes] == [22, 1, 1, 3]


def test_neighbours_in_order_share_the_most():
    order, shared = sorted_by_tokens([ids(20 * "A" + "z"), ids("P"), ids(20 * "A" + "b")])
    assert (order, shared) == ([2, 0, 1], [0, 20, 0])
    assert sorted_by_tokens([ids("AB"), ids("AC")]) == ([0, 1], [0, 0])


def test_no_mask_has_the_size_of_the_row(every_prefix, monkeypatch):
    monkeypatch.setattr(attention, "MAX_MASKED_QUERIES", 3)
    of_leaf = node_batches(build_forest([ids("AB"), ids("ABcdefg")]))[1:]
    assert [batch.queries_BQ.tolist() for batch in of_leaf] == [[[2, 3, 4]], [[5, 6]]]
    assert [batch.keys_BK.tolist() for batch in of_leaf] == [[[*range(5)]], [[*range(7)]]]
    # A window of 2: each block's first query sees itself and the one before it.
    windowed = node_batches(build_forest([ids("AB"), ids("ABcdefg")]), 2)
    assert [batch.keys_BK.tolist() for batch in windowed] == [
        [[0, 1]],
        [[1, 2, 3, 4]],
        [[4, 5, 6]],
    ]


def test_a_small_tree_attends_as_a_whole_by_a_mask_of_its_own(every_prefix):
    # Of 7 tokens: 49 pairs, and of its nodes apart 8 + 6 + 4 and the gathering of 4 + 6 + 5 keys.
    built = build_forest([ids("ABCDxy"), ids("PQ"), ids("ABCDz"), ids("VWr"), ids("VWs")])
    trees, single = attention.batches_of(built), (7, 8)
    assert [(batch.queries_BQ.tolist(), batch.lengths_B) for batch in trees] == [
        ([[0, 1, 2, 3, 4, 5, 6]], (7,)),
        ([[9, 10, 11, 12]], (4,)),
        ([[*single]], (2,)),  # one node: plain causal attention
    ]
    assert trees[0].seen_BQK is not None and trees[2].seen_BQK is None
    assert trees[0].seen_BQK[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0, 0, 1],
    ]
    windowed = attention.batches_of(built, 2)[0].seen_BQK
    assert windowed is not None
    assert windowed[0].astype(int)[4:].tolist() == [
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 0, 0, 1],
    ]


def test_trees_of_like_length_are_one_batch_in_which_no_query_sees_padding(every_prefix):
    built = build_forest([ids("ABCx"), ids("ABCy"), ids("VWXrs"), ids("VWXt")])
    (batch,) = attention.batches_of(built)
    assert batch.queries_BQ.tolist() == [[5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 4]]
    assert batch.lengths_B == (6, 5) and batch.seen_BQK is not None
    assert not batch.seen_BQK[1, :, 5].any()
    assert batch.seen_BQK[1, 5].astype(int).tolist() == [1, 1, 1, 0, 1, 0]


def test_a_tree_is_taken_apart_where_that_has_fewer_pairs():
    """Of 8 answers of 100 tokens to a prompt of 100 each sees one ninth of the tree."""
    answers = [ids("A" * 100 + letter + 99 * "z") for letter in "abcdefgh"]
    batches = attention.batches_of(build_forest(answers))
    assert [batch.seen_BQK for batch in batches] == [None, None]


def make(architecture: str):
    torch.manual_seed(0)
    config = CONFIGS[architecture]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def some_forest(draw: random.Random) -> list[Example]:
    """Returns conversations that branch. Some are a prefix of another, two are the same, and some
    of their tokens are trained."""
    sequences: list[list[int]] = []

    def branch(prefix: list[int], depth: int) -> None:
        for _ in range(draw.randint(1, 3)):
            length = draw.choice([1, 2, 5, 17, 40])
            ids = prefix + [draw.randrange(draw.choice([3, 64])) for _ in range(length)]
            if draw.random() < 0.6:
                sequences.append(ids)
            if depth < 3 and draw.random() < 0.6:
                branch(ids, depth + 1)

    while not sequences:
        branch([], 0)
        branch([], 0)
    sequences.append([*draw.choice(sequences)])
    return [_example(ids if len(ids) > 1 else [*ids, 1], draw) for ids in sequences[-12:]]


def _example(ids: list[int], draw: random.Random) -> Example:
    start = draw.randint(1, len(ids) - 1)
    sampled = [int(draw.random() < 0.7) for _ in ids[start:]]
    sampled[draw.randrange(len(sampled))] = 1
    return Example(
        prompt_token_ids=TokenIds(ids[:start]),
        token_ids=TokenIds(ids[start:]),
        sampled=sampled,
        advantage=1.0,
    )


@pytest.mark.parametrize("architecture", CONFIGS)
def test_log_probs_and_gradients_are_those_of_padded_rows(architecture, monkeypatch):
    padded, shared = make(architecture), make(architecture)
    assert choose_layout(shared, architecture, MemorySpec(shared_prefix="on")).layout == "shared"
    draw, distances, num_saved = random.Random(3), [], 0
    for trial in range(16):
        monkeypatch.setattr(attention, "MAX_MASKED_QUERIES", 8 if trial % 2 else 512)
        # None of the trees whole; those that are cheaper; all, in batches of one or of several.
        pairs, most = ((0, 0), (12, 1 << 22), (10**6, 2500), (10**6, 1 << 22))[trial % 4]
        monkeypatch.setattr(attention, "PAIRS_PER_KEY", pairs)
        monkeypatch.setattr(attention, "MAX_TREE_PAIRS", most)
        examples = some_forest(draw)
        batch = collate(examples, layout="shared")
        num_saved += batch.num_sequence_tokens - batch.input_ids_BT.numel()
        expected, expected_gradients = _trained(padded, collate(examples))
        found, gradients = _trained(shared, batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        norm = _norm(expected_gradients)
        apart = [a - b for a, b in zip(gradients, expected_gradients, strict=True)]
        if norm > 1e-3:  # below that the loss is at its optimum, and rounding is all
            distances.append(_norm(apart) / norm)
    assert max(distances) < 1e-5 and sorted(distances)[len(distances) // 2] < 1e-6
    assert num_saved > 1600


def _trained(model, batch):
    """Returns the log-probs, and the gradient of a sum of them by each parameter."""
    logprobs, _ = Policy(model, 0.8)(batch)
    weights = torch.linspace(-1, 1, len(logprobs)) + 0.3
    return logprobs, torch.autograd.grad((logprobs * weights).sum(), list(model.parameters()))


def _norm(tensors) -> float:
    return float(sum(tensor.square().sum() for tensor in tensors).sqrt())


def test_gradient_checkpointing_works_over_a_forest():
    model, recomputed = make("qwen2"), make("qwen2")
    batch = collate(some_forest(random.Random(5)), layout="shared")
    for each in (model, recomputed):
        check_head(each, "tiny")
        assert choose_layout(each, "tiny", MemorySpec()).layout == "shared"
    checkpoint_body(recomputed, "tiny")
    for mine, other in zip(_trained(recomputed, batch)[1], _trained(model, batch)[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_a_pass_does_not_keep_the_keys_that_branches_gather(every_prefix, gathers, monkeypatch):
    """40 branches of one token gather their 60 common tokens again each: 2,500 keys of 100 tokens.
    Without recomputing, each of 3 layers keeps their 2 x 2 heads x 8 numbers in float32."""
    monkeypatch.setattr(attention, "MAX_TREE_PAIRS", 0)
    model = make("qwen2")
    choose_layout(model, "tiny", MemorySpec())
    sequences = [TokenIds([*([5, 9, 7] * 20), last, 1]) for last in range(10, 50)]
    batch = collate(
        [
            Example(prompt_token_ids=TokenIds(ids[:60]), token_ids=TokenIds(ids[60:]), advantage=1)
            for ids in sequences
        ],
        layout="shared",
    )
    assert batch.input_ids_BT.shape == (1, 100) and batch.forest is not None
    assert len(batch.forest.dense(None, torch.float32).keys_M) == 60 + 40 * 61
    kept, gradients = {}, {}
    for most in (2, 10**6):
        monkeypatch.setattr(attention, "MAX_KEPT_KEYS", most)
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each, sizes=sizes: (each, sizes.setdefault(each.data_ptr(), each.nbytes))[0],
            lambda each: each,
        ):
            logprobs, _ = Policy(model, 1.0)(batch)
        kept[most] = sum(sizes.values())
        gradients[most] = torch.autograd.grad(logprobs.sum(), list(model.parameters()))
    gathered = 3 * 2500 * 2 * 2 * 8 * 4
    assert kept[10**6] - kept[2] == pytest.approx(gathered, rel=0.1)
    assert all(map(torch.equal, gradients[2], gradients[10**6]))


DEEP = ("ABCDEFGHxy", "ABCDEFGHz", "ABCDEFGHzuvw", "ABCDkl", "ABCDkmn", "PQ", "RST", "RSU", "A")


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_cascade_is_attention_to_all_tokens_before(every_prefix, monkeypatch, num_groups):
    """Against a softmax over the tokens before each one in its sequence, written out, for a tree of
    four levels beside a small one that is computed as a whole."""
    monkeypatch.setattr(attention, "MAX_TREE_PAIRS", 30)
    built = build_forest([ids(text) for text in DEEP])
    cascade = attention.ForestAttention(built, torch.device("cpu")).dense(None, torch.float64)
    assert isinstance(cascade, attention.CascadeAttention)
    levels = [(after.start - own.start, after.stop - after.start) for own, after in cascade.parents]
    # A, BCD, EFGH, z before uvw, and k before l and mn. RST and RSU are a whole tree, with a mask.
    assert levels == [(1, 17), (3, 14), (4, 6), (1, 3), (1, 3)]
    assert cascade.own.batches[0].mask is not None
    torch.manual_seed(0)
    shapes = ((2 * num_groups, 8), (2, 8), (2, 8))
    q, k, v = (
        torch.randn(len(built.tokens_T), *shape, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    )
    expected = torch.zeros_like(q)
    for columns in built.columns:
        for place, column in enumerate(columns):
            seen = torch.from_numpy(columns[: place + 1])
            keys, values = (row[seen].repeat_interleave(num_groups, 1) for row in (k, v))
            weights = (0.5 * torch.einsum("ad,kad->ak", q[column], keys)).softmax(-1)
            one = torch.zeros_like(q)
            one[column] = 1.0
            expected = torch.where(one > 0, torch.einsum("ak,kad->ad", weights, values), expected)
    out = cascade.attend(q, k, v, 0.5)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(each, [q, k, v], upstream) for each in (out, expected))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strided", [0, 1, 2])
def test_a_cascade_takes_tensors_as_they_lie_in_memory(every_prefix, monkeypatch, strided):
    monkeypatch.setattr(attention, "MAX_TREE_PAIRS", 0)
    row = attention.ForestAttention(build_forest([ids("ABx"), ids("ABy")]), torch.device("cpu"))
    cascade = row.dense(None, torch.float32)
    assert isinstance(cascade, attention.CascadeAttention)
    qkv = [torch.randn(4, 2, 8) for _ in range(3)]
    expected = cascade.attend(*qkv, 0.5)
    qkv[strided] = qkv[strided].transpose(0, 2).contiguous().transpose(0, 2)
    assert qkv[strided].stride(-1) != 1
    torch.testing.assert_close(cascade.attend(*qkv, 0.5), expected)


def test_values_of_another_size_than_keys_are_gathered(every_prefix, monkeypatch):
    monkeypatch.setattr(attention, "MAX_TREE_PAIRS", 0)
    row = attention.ForestAttention(build_forest([ids("ABx"), ids("ABy")]), torch.device("cpu"))
    q, k, v = (torch.randn(1, 2, 4, size) for size in (8, 8, 6))
    module = Mock(is_causal=True)
    attended, _ = attention.attend(module, q, k, v, None, forest=row)
    assert isinstance(row.dense(None, torch.float32, same_sizes=False), DenseAttention)
    assert attention.attend(module, q, k, k, None, forest=row)[0].shape == (1, 4, 2, 8)
    for columns in ([0, 1, 2], [0, 1, 3]):
        alone = torch.nn.functional.scaled_dot_product_attention(
            *(each[:, :, columns] for each in (q, k, v)), is_causal=True
        )
        torch.testing.assert_close(attended[0, columns].transpose(0, 1), alone[0])


def test_a_model_with_another_kind_of_attention_does_not_share():
    unlike = make("gemma3")
    unlike.config.layer_types = ["full_attention"] * 3  # but its layers still have windows
    assert choose_layout(unlike, "unlike", MemorySpec()).layout == "padded"
    assert unlike.config._attn_implementation == "sdpa"
    chunked = make("llama")
    chunked.config.attention_chunk_size = 8
    assert "within chunks" in str(attention.why_not(chunked.config))
    recurrent = make("qwen2")
    recurrent.config.block_types = ["recurrent", "attention"]
    assert "another kind: 'recurrent'" in str(attention.why_not(recurrent.config))
    capped = make("qwen2")
    capped.config.attn_logit_softcapping = 50.0
    assert "caps the logits of its attention" in str(attention.why_not(capped.config))
    hybrid = make("qwen2")
    hybrid.config.layer_types = ["linear_attention", "full_attention", "full_attention"]
    assert attention.why_not(hybrid.config) == "has layers of another kind: 'linear_attention'"


def test_a_forest_that_gives_nan_is_not_taken(monkeypatch):
    model = make("llama")
    monkeypatch.setattr(DenseAttention, "attend", lambda _, q_TAD, *__: q_TAD * torch.nan)
    chosen = choose_layout(model, "tiny", MemorySpec())
    assert chosen.layout == "padded" and "changes a token's hidden state by nan" in chosen.without


def test_a_lack_of_memory_while_a_forest_is_tried_says_nothing_of_the_model(monkeypatch):
    model = make("llama")
    monkeypatch.setattr(DenseAttention, "attend", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        choose_layout(model, "tiny", MemorySpec())
    assert model.config._attn_implementation == "sdpa"


def test_a_micro_batch_keeps_no_masks_of_the_pass_that_is_over():
    model = make("llama")
    choose_layout(model, "tiny", MemorySpec())
    batch = collate(some_forest(random.Random(5)), layout="shared")
    on_device = batch.to(torch.device("cpu"))
    Policy(model, 1.0)(on_device)
    assert batch.forest is not None and on_device.forest is not None
    assert on_device.forest.windows == {None} and batch.forest.windows == set()


def test_all_masks_of_a_row_are_parts_of_the_largest(every_prefix, gathers, monkeypatch):
    monkeypatch.setattr(attention, "MAX_MASKED_QUERIES", 3)
    monkeypatch.setattr(attention, "MAX_TREE_PAIRS", 0)
    row = attention.ForestAttention(build_forest([ids("AB"), ids("ABcdefg")]), torch.device("cpu"))
    masks = [batch.mask for batch in row.dense(None, torch.float64).batches[1:]]
    seen = [(mask == 0).int().tolist() for mask in masks]
    assert seen == [
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]],
    ]
    assert {mask.dtype for mask in masks} == {torch.float64}
    assert len({mask.untyped_storage().data_ptr() for mask in masks}) == 1


class Noted(torch.autograd.Function):
    """Notes in its backward pass whether torch adds up in a fixed order."""

    @staticmethod
    def forward(ctx, x, name, notes):
        ctx.note = lambda: notes.append((name, torch.are_deterministic_algorithms_enabled()))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.note()
        return gradient, None, None


@pytest.fixture
def kernel(monkeypatch):
    """Stands in for torch's kernel, which CPUs lack, with the arguments of torch 2.11, and returns
    what its backward pass notes."""
    notes = []

    def varlen_attn(q_TAD, k_KHD, v_KHD, q_ends, k_ends, max_q, max_k, *, scale, window_size):
        outs = []
        for q0, q1, k0, k1 in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False):
            q, k, v = (each.transpose(0, 1) for each in (q_TAD[q0:q1], k_KHD[k0:k1], v_KHD[k0:k1]))
            behind = torch.arange(k1 - k0)[None] - torch.arange(q1 - q0)[:, None] - (k1 - k0)
            mask = behind + (q1 - q0) <= 0
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, scale=scale, enable_gqa=True
            )
            outs.append(out.transpose(0, 1))
        return Noted.apply(torch.cat(outs), "kernel", notes)

    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    return notes


def test_the_kernels_gradient_is_added_up_in_order_and_no_other(every_prefix, kernel, monkeypatch):
    monkeypatch.setattr(
        torch,
        "use_deterministic_algorithms",
        set_for_real := Mock(side_effect=torch.use_deterministic_algorithms),
    )
    torch.manual_seed(0)
    built = build_forest([ids("ABCDxy"), ids("ABCDz"), ids("PQ")])
    q, k, v = (torch.randn(9, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    results = []
    for kind in ("ragged", "dense"):
        row = attention.ForestAttention(built, torch.device("cpu"))
        before = [Noted.apply(each, "before", kernel) for each in (q, k, v)]
        if kind == "ragged":
            (whole,) = row.ragged(None).parts
            out = whole.attend(*before, 0.5, None)
        else:
            out = row.dense(None, torch.float32).attend(*before, 0.5)
        out = Noted.apply(out, "after", kernel)
        results.append((out, *torch.autograd.grad(out.square().sum(), [q, k, v])))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    others = [("after", False), *[("before", False)] * 3]
    assert kernel == [("after", False), ("kernel", True), *others[1:], *others]
    assert [call.args for call in set_for_real.call_args_list] == [(True,), (False,)]
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_the_kernel_is_called_for_a_part_of_the_nodes_at_a_time(every_prefix, kernel, monkeypatch):
    """By their queries, 4, 2, 1 and 2 with 10 of padding each, or by their 4, 6, 5 and 2 keys. More
    keys than 2 per token are gathered again in the backward pass, part by part."""
    built = build_forest([ids("ABCDxy"), ids("ABCDz"), ids("PQ")])
    monkeypatch.setattr(attention, "KERNEL_PADDING", 10)

    def parts(tokens, keys):
        monkeypatch.setattr(attention, "KERNEL_TOKENS", tokens)
        monkeypatch.setattr(attention, "KERNEL_KEYS", keys)
        return [[node.start for node in part] for part in attention.ragged_parts(built)]

    assert parts(49, 17) == [[0, 4, 6, 7]]
    assert parts(48, 17) == [[0, 4, 6], [7]]
    assert parts(49, 10) == [[0, 4], [6, 7]]
    assert parts(1, 1) == [[0], [4], [6], [7]]
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    row = attention.ForestAttention(built, torch.device("cpu"), is_recomputed=True)
    ragged = row.ragged(None)
    outs = {
        most: torch.cat(
            [
                row.attended(part.attend, most, q, k, v, 0.5, None, is_part=True)
                for part in ragged.parts
            ]
        )
        for most in (0, 10**6)
    }
    expected = row.dense(None, torch.float32).attend(q, k, v, 0.5)
    wanted = torch.autograd.grad(expected.square().sum(), [q, k, v])
    for out in outs.values():
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(out.square().sum(), [q, k, v])
        for each, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(each, other, rtol=1e-5, atol=1e-5)
