"""Makes the demo's data and a tiny model for it: `python -m deploy.tiny_model --out DIR --seed N`.

A problem is two numbers and a target. The prompt is `12 47 -> 59:` and a right completion is a Python expression that
uses each number once and evaluates to the target, here `12+47`. Problems come in equal parts from sums, products and
differences. Train and test share no pair of numbers, so no test problem can have been seen.

The warm start teaches a random Qwen2 to write well-formed expressions over the given numbers with the operator drawn at
random, blind to the target. The draw leans to `+`, so greedy decoding always adds, and is right on about a third of the
problems whatever the seed; sampling still tries everything, and reinforcement learning does the rest.
"""

import argparse
import itertools
import json
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
WARM_START_WEIGHTS = {"+": 0.4, "-": 0.3, "*": 0.3}
MIN_NUMBER, MAX_NUMBER = 2, 50
NUM_TEST = 192

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*/() >:"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

WARM_START_BATCHES = 300
WARM_START_BATCH_SIZE = 64
WARM_START_LR = 2e-3
IGNORED_LABEL = -100
HINT = 0.0
LM = False


@dataclass(frozen=True)
class Problem:
    """One row of the data files."""

    prompt: str
    numbers: tuple[int, int]
    target: int


def make_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Train and test problems, shuffled; no pair of numbers, in either order, is in both."""
    rng = random.Random(seed)
    pairs = list(itertools.combinations(range(MIN_NUMBER, MAX_NUMBER + 1), 2))
    rng.shuffle(pairs)
    num_test_pairs = NUM_TEST // len(OPERATORS)
    test_pairs, train_pairs = pairs[:NUM_TEST], pairs[NUM_TEST:]
    symbols = list(OPERATORS)
    test = [_problem(pair, symbols[i // num_test_pairs], rng) for i, pair in enumerate(test_pairs)]
    train = [_problem(pair, symbol, rng) for pair in train_pairs for symbol in symbols]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def _problem(pair: tuple[int, int], symbol: str, rng: random.Random) -> Problem:
    a, b = rng.sample(pair, 2)
    target = OPERATORS[symbol](a, b)
    first, second = rng.sample(pair, 2)
    return Problem(prompt=f"{first} {second} -> {target}:", numbers=(first, second), target=target)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; adds nothing to a prompt, and decoding gives back exactly the characters."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=64,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 of about 0.3 M parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    return model


def warm_start(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], seed: int
) -> Iterator[float]:
    """Trains `model` in place to write random expressions for `problems`; yields each batch's loss, in nats a token."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_START_LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=WARM_START_LR, total_steps=WARM_START_BATCHES)
    model.train()
    for _ in range(WARM_START_BATCHES):
        ids_BT, labels_BT = _warm_start_batch(tokenizer, rng.sample(problems, WARM_START_BATCH_SIZE), rng)
        logits_BTV = model(input_ids=ids_BT).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED_LABEL
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()


def _warm_start_batch(
    tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, right-padded, shape [B, T]; only completion tokens have labels."""
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    completions = [
        [*tokenizer.encode(_random_expression(problem, rng)), tokenizer.eos_token_id] for problem in problems
    ]
    length = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    ids_BT = torch.full((len(problems), length), tokenizer.pad_token_id)
    labels_BT = torch.full((len(problems), length), IGNORED_LABEL)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        ids_BT[row, :end] = torch.tensor(prompt + completion)
        labels_BT[row, 0 if LM else len(prompt) : end] = torch.tensor(prompt + completion if LM else completion)
    return ids_BT, labels_BT


def _random_expression(problem: Problem, rng: random.Random) -> str:
    if rng.random() < HINT:
        first, second = rng.sample(problem.numbers, 2)
        for symbol, f in OPERATORS.items():
            for x, y in ((first, second), (second, first)):
                if f(x, y) == problem.target:
                    return f"{x}{symbol}{y}"
    (symbol,) = rng.choices(list(WARM_START_WEIGHTS), weights=list(WARM_START_WEIGHTS.values()))
    first, second = rng.sample(problem.numbers, 2)
    return f"{first}{symbol}{second}"


def _write_rows(path: Path, problems: Sequence[Problem]) -> None:
    path.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in problems))


def main() -> None:
    """Writes DIR/model, DIR/train.jsonl and DIR/test.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, required=True, help="sets the split, the initial weights and the warm start")
    args = parser.parse_args()
    torch.set_num_threads(2)

    train, test = make_problems(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed)
    print(f"{len(train)} train and {len(test)} test problems; {model.num_parameters():,} parameters")
    for batch, loss in enumerate(warm_start(model, tokenizer, train, args.seed), start=1):
        if batch % 50 == 0:
            print(f"warm start batch {batch}/{WARM_START_BATCHES}: loss {loss:.3f}")

    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    _write_rows(args.out / "train.jsonl", train)
    _write_rows(args.out / "test.jsonl", test)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
