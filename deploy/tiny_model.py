"""Makes the data of `make demo-tiny` and a tiny model for it:
`python -m deploy.tiny_model --out DIR --seed N`.

A problem is two numbers and a target. The prompt is `12 47 -> 59:` and a right completion is a
Python expression that uses each number once and evaluates to the target, here `12+47`. Sums,
differences and products come in equal parts. Train and test share no pair of numbers, in either
order, so no test problem occurs in training.

The warm start teaches a random Qwen2 the form of a row: the prompts, and after each an expression
over its two numbers, until it copies the numbers without fault. The operator is right in a fifth of
the rows and otherwise drawn independently of the target, with a bias to `+`. So greedy decoding
nearly always adds, and is right on about a third of the problems whatever the seed, while sampling
at temperature 1 tries every operator and gives reinforcement learning different outcomes to choose
from.
"""

import argparse
import itertools
import json
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MIN_NUMBER, MAX_NUMBER = 10, 50
"""Two digits each: a model learns to copy numbers of one width much sooner than of two widths."""

NUM_TEST = 192

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
CHARACTERS = "0123456789+-*/%()<=>: "
"""With the two special tokens 24 in all. That is a multiple of 8, so the vocabulary needs no
padding, and every id that the model can emit is a character."""

MAX_LENGTH = 64
BYTE_LEVEL = {" ": "\u0120", "\n": "\u010a"}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

WARM_START_MAX_BATCHES = 3000
"""Most batches of the warm start. It ends once the model copies the numbers, which happens
suddenly, at another batch for each seed."""

WARM_START_RISE = 100
WARM_START_FALL = 150
COPIED_ENOUGH = 0.98
WARM_START_BATCH_SIZE = 32
WARM_START_LR = 1.5e-3
RIGHT_OPERATOR_SHARE = 0.2
BLIND_WEIGHTS = {"+": 0.6, "-": 0.2, "*": 0.2}
"""The bias must outweigh the share of right operators, because greedy decoding would otherwise be
right from the start: 0.8 * 0.6 > 0.2 + 0.8 * 0.2."""

IGNORED_LABEL = -100
BATCHES_PER_REPORT = 100


@dataclass(frozen=True)
class Problem:
    """One row of a data file."""

    prompt: str
    numbers: tuple[int, int]
    target: int


def make_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Returns train and test problems, shuffled. The train set has every operator for each of its
    pairs, the test set one for each."""
    rng = random.Random(seed)
    pairs = list(itertools.combinations(range(MIN_NUMBER, MAX_NUMBER + 1), 2))
    rng.shuffle(pairs)
    test_pairs, train_pairs = pairs[:NUM_TEST], pairs[NUM_TEST:]
    test = [
        _problem(pair, symbol, rng)
        for pair, symbol in zip(test_pairs, itertools.cycle(OPERATORS), strict=False)
    ]
    train = [_problem(pair, symbol, rng) for pair in train_pairs for symbol in OPERATORS]
    rng.shuffle(test)
    rng.shuffle(train)
    return train, test


def _problem(pair: tuple[int, int], symbol: str, rng: random.Random) -> Problem:
    first, second = rng.sample(pair, 2)
    target = OPERATORS[symbol](first, second)
    return Problem(prompt=f"{first} {second} -> {target}:", numbers=(first, second), target=target)


def make_tokenizer() -> Qwen2Tokenizer:
    # the first two in the order of PAD_ID and EOS_ID
    return tokenizer_of([PAD, EOS], CHARACTERS, MAX_LENGTH, CHAT_TEMPLATE)


def tokenizer_of(
    special: Sequence[str], characters: str, max_length: int, chat_template: str
) -> Qwen2Tokenizer:
    """Returns a tokenizer of one token per character, which adds nothing to a text, decodes to
    exactly the characters and drops unknown ones. The first of the `special` tokens is for padding,
    the last one ends a text.

    A byte pair encoding without merges, because `AutoTokenizer` loads a Qwen2 checkpoint's
    tokenizer as this class only.
    """
    symbols = [*special, *(BYTE_LEVEL.get(each, each) for each in characters)]
    return Qwen2Tokenizer(
        vocab={symbol: id for id, symbol in enumerate(symbols)},
        merges=[],
        unk_token=special[0],
        pad_token=special[0],
        eos_token=special[-1],
        additional_special_tokens=[*special[1:-1]],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=chat_template,
    )


def make_model(seed: int) -> Qwen2ForCausalLM:
    """Returns a Qwen2 of 0.3 M parameters with random weights in float32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len([PAD, EOS, *CHARACTERS]),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,
        tie_word_embeddings=False,
        dtype="float32",
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, eos_token_id=EOS_ID)
    return model


def warm_start(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: Sequence[Problem], seed: int
) -> int:
    """Trains `model` in place to write mostly random expressions for `problems`, until it copies
    their numbers; returns the number of batches. Prints the loss, in nats per token."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_START_LR, weight_decay=0.0)
    copied, end = 0.0, WARM_START_MAX_BATCHES
    model.train()
    for batch in range(1, WARM_START_MAX_BATCHES + 1):
        rate = min(batch / WARM_START_RISE, (end - batch + 1) / WARM_START_FALL, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = WARM_START_LR * rate
        ids_BT, labels_BT, copies_BT = _rows(
            tokenizer, rng.sample(problems, WARM_START_BATCH_SIZE), rng
        )
        logits_BTV = model(input_ids=ids_BT).logits[:, :-1]
        loss = cross_entropy(
            logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED_LABEL
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right_BT = (logits_BTV.argmax(-1) == labels_BT[:, 1:])[copies_BT[:, 1:]]
        copied += 0.1 * (right_BT.float().mean().item() - copied)
        if copied >= COPIED_ENOUGH and end == WARM_START_MAX_BATCHES:
            end = min(batch + WARM_START_FALL, end)
        if batch % BATCHES_PER_REPORT == 0 or batch == end:
            print(
                f"warm start: batch {batch}, loss {loss.item():.3f}, copies {copied:.1%} of the "
                "digits",
                flush=True,
            )
        if batch == end:
            break
    model.eval()
    return end


def _rows(
    tokenizer: Qwen2Tokenizer, problems: Sequence[Problem], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and labels [B, T], padded on the right, and where the labels are digits of an
    expression. Prompts have labels too, because reading them is half of what is learned."""
    texts = [problem.prompt + _expression(problem, rng) for problem in problems]
    rows = [torch.tensor(tokenizer.encode(text + EOS)) for text in texts]
    copies = [
        torch.tensor(
            [
                position >= len(problem.prompt) and text[position].isdigit()
                for position in range(len(text))
            ]
            + [False]
        )
        for problem, text in zip(problems, texts, strict=True)
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    ids_BT = pad(rows, batch_first=True, padding_value=PAD_ID)
    labels_BT = pad(rows, batch_first=True, padding_value=IGNORED_LABEL)
    return ids_BT, labels_BT, pad(copies, batch_first=True, padding_value=False)


def _expression(problem: Problem, rng: random.Random) -> str:
    """The two numbers in prompt order around an operator: the right one sometimes, otherwise one
    drawn independently of the target."""
    first, second = problem.numbers
    if rng.random() < RIGHT_OPERATOR_SHARE:
        symbol = next(
            symbol for symbol, apply in OPERATORS.items() if apply(first, second) == problem.target
        )
    else:
        (symbol,) = rng.choices(list(BLIND_WEIGHTS), weights=list(BLIND_WEIGHTS.values()))
    return f"{first}{symbol}{second}"


def write_task(out: Path, seed: int) -> None:
    """Writes out/model, out/train.jsonl and out/test.jsonl; the same seed writes the same files."""
    train, test = make_problems(seed)
    tokenizer = make_tokenizer()
    model = make_model(seed)
    print(
        f"{len(train)} train and {len(test)} test problems; a model of {model.num_parameters():,} "
        "parameters"
    )
    warm_start(model, tokenizer, train, seed)

    out.mkdir(parents=True, exist_ok=True)
    _write_problems(out / "train.jsonl", train)
    _write_problems(out / "test.jsonl", test)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


def _write_problems(path: Path, problems: Sequence[Problem]) -> None:
    path.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in problems))


def write_from_command_line(
    write_task: Callable[[Path, int], None], description: str | None
) -> None:
    """Reads `--out` and `--seed` from the command line, and writes the task there."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write")
    parser.add_argument(
        "--seed",
        type=int,
        required=True,
        help="sets the split, the first weights and the warm start",
    )
    args = parser.parse_args()
    logging.disable_progress_bar()
    # so small a model gains little from more threads, and loses minutes if the cores are busy
    torch.set_num_threads(1)
    write_task(args.out, args.seed)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    write_from_command_line(write_task, __doc__)
