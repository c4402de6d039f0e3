"""Makes a tiny chat model that calls a tool: `python -m deploy.tool_model --out DIR --seed N`.

The tool is `guess(number)`, with which a model looks for a secret number from 0 to 31; the answers
of the tool are `higher`, `lower` and `correct`. The model is made in seconds, without a warm start.
Its first weights are written so that each token depends on the token before it alone. So nearly
every answer is a legal call, one in six of them several calls at once, and the numbers do not
depend on the tool's answers: reinforcement learning has to find the relation. It learns first which
numbers the secrets come from: eight guesses find one in six of them at the start, and one in three
after 12 batches of 128 games (AdamW, at a rate that falls from 1e-3). Learning to use `higher` and
`lower` takes hundreds.

A call is three tokens: its head, the number and its end. Together they are the text of a call as
Hermes and Qwen2.5 write it, which vLLM's parser `hermes` reads. Everything else is one token per
character of ASCII, except the words of the game.
"""

import json
import math
import random
import string
from pathlib import Path

import torch
from transformers import AddedToken, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from deploy.tiny_model import tokenizer_of, write_from_command_line

PAD, BEGIN, END = "<pad>", "<|im_start|>", "<|im_end|>"
PAD_ID, END_ID = 0, 2
ASKED = [{"role": "user", "content": "Find the number."}]
NUM_TRAIN, NUM_TEST = 256, 32
SECRETS = range(12, 16)
"""The secret numbers: a part of the 32, so that there is something to learn before "higher" and
"lower"."""

NUMBERS = [str(number) for number in range(32)]
HEAD = '<tool_call>\n{"name": "guess", "arguments": {"number": '
TAIL = "}}\n</tool_call>"
ANSWER = "assistant\n"
ROLES = ["system\n", "user\n", ANSWER, "tool\n"]
WORDS = ["higher", "lower", "correct"]
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
WHOLE = [HEAD, TAIL, *ROLES, *WORDS, *NUMBERS[10:]]
"""The tokens of more than one character."""

MAX_LENGTH = 512
HIDDEN_SIZE = 160
"""At least the vocabulary, so that the embeddings can be at right angles to each other."""

EMBEDDING_NORM = 4.0
"""Large compared with the output of the random layers, so that a token decides the next one."""

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools:"
    "{% for tool in tools %} {{ tool.function.name }}"
    "({{ tool.function.parameters.properties | default({}) | join(', ') }})"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}"
    "}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

NEXT: dict[str, dict[str, float]] = {
    ANSWER: {HEAD: 0.9, "correct": 0.05},
    HEAD: dict.fromkeys(NUMBERS, 0.98 / len(NUMBERS)),
    **{number: {TAIL: 0.98} for number in NUMBERS},
    TAIL: {END: 0.83, HEAD: 0.15},
    **{word: {END: 0.9} for word in WORDS},
}
"""The initial probability of a token after another one. All other tokens share the rest."""


def make_tokenizer() -> Qwen2Tokenizer:
    tokenizer = tokenizer_of([PAD, BEGIN, END], CHARACTERS, MAX_LENGTH, CHAT_TEMPLATE)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in WHOLE])
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Returns a Qwen2 of 0.5 M parameters in float32, whose first weights follow `NEXT`."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / 8) * 8,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=None,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, eos_token_id=END_ID)
    _write_next(model, tokenizer)
    return model


@torch.no_grad()
def _write_next(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    """Writes `NEXT` into the embeddings and the head. The embeddings are at right angles, so a row
    of the head gets, for each preceding token, the logit of its probability; all other tokens have
    0."""
    vocab_size, id_of = model.config.vocab_size, tokenizer.convert_tokens_to_ids
    embedding_VH = torch.nn.init.orthogonal_(torch.empty(vocab_size, HIDDEN_SIZE))
    logits_VV = torch.zeros(vocab_size, vocab_size)
    for before, shares in NEXT.items():
        rest = (1 - sum(shares.values())) / (vocab_size - len(shares))
        for after, share in shares.items():
            logits_VV[id_of(after), id_of(before)] = math.log(share / rest)
    model.model.embed_tokens.weight.copy_(EMBEDDING_NORM * embedding_VH)
    # the last norm scales each embedding to this length
    model.lm_head.weight.copy_(logits_VV @ embedding_VH / math.sqrt(HIDDEN_SIZE))


def write_task(out: Path, seed: int) -> None:
    """Writes out/model, out/train.jsonl and out/test.jsonl; the same seed writes the same files."""
    make_tool_model(out / "model", seed)
    rng = random.Random(seed)
    for name, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        rows = [{"prompt": ASKED, "secret": rng.choice(SECRETS)} for _ in range(count)]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tool_model(folder: Path, seed: int = 0) -> Path:
    """Writes model and tokenizer, the same for the same seed, and returns `folder`."""
    tokenizer = make_tokenizer()
    with torch.random.fork_rng():
        make_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    write_from_command_line(write_task, __doc__)
