"""SmolLM2-135M-Instruct on the real stack: an adapter learns sums from chat prompts, and an agent
talks over several turns. What is recorded, trained, served and saved is compared with plain
transformers and PEFT.

One stack, in float32, so that greedy decoding and log-probs have one right result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.orchestrator.store.folder import RunFolder
from shared.http.client import Client
from shared.wire import (
    ConversationPrefix,
    GenerateRequest,
    Message,
    Rollout,
    RolloutGroup,
    Sampling,
    TokenIds,
)
from tests.support.hone_stack import HoneStack, own_environment
from tests.support.real_model import real_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

END = 2
"""The id of <|im_end|>."""

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM"
SYSTEM: Message = {"role": "system", "content": "Answer with a number."}

COMMON = """
model = "{model}"
max_model_len = 512

[lora]
rank = 8
alpha = 16.0

[training]
dtype = "float32"
learning_rate = 2e-4
"""
SUMS = """
name = "sums"
steps = 2
seed = 1
{common}
[data]
train = "train.jsonl"
eval = "held_out.jsonl"

[sampling]
prompts_per_step = 4
group_size = 4
max_tokens = 48
repeatable = true

[[rewards]]
grader = "function"
file = "reward.py"
function = "right"

[checkpoints]
every = 1

[evaluation]
every = 1000
pass_reward = 1.0
max_tokens = 10          # greedy texts of float32 differ where two tokens are nearly equally likely
"""
REWARD = r"""
import re


def right(completions, answer, **columns):
    texts = [said[-1]["content"] for said in completions]
    found = [re.findall(r"\d+", text) for text in texts]
    right = [bool(f) and int(f[-1]) == a for f, a in zip(found, answer, strict=True)]
    return [one + 0.001 * len(text) for one, text in zip(right, texts, strict=True)]
"""
"""A right answer, and a little for each character, so that every group has a signal."""

TALK = """
name = "talk"
steps = 1
seed = 1
{common}
[data]
train = "talks.jsonl"

[sampling]
prompts_per_step = 2
group_size = 4
max_tokens = 200
temperature = 2.0        # many answers have tokens that their text would not give

[environment]
kind = "worker"
max_turns = 3
"""
AGENT = r"""
import json

import openai


async def run(row, base_url, api_key):
    messages, answers = [], []
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for said, max_tokens in ((row["prompt"], 24), ("And then?", 12), ("Continue.", 24)):
            messages.append({"role": "user", "content": said})
            answer = await client.chat.completions.create(
                model="policy",
                messages=messages,
                max_tokens=max_tokens,
                extra_body={"return_token_ids": True},
            )
            answers.append(answer.model_dump())
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    with open("talks.out", "a") as file:
        file.write(json.dumps({"messages": messages, "answers": answers}) + "\n")
    return float(len(messages[-1]["content"]))
"""
TALKS = [{"prompt": "Tell me a story."}, {"prompt": "What is a lighthouse?"}]


def row_of(a: int, b: int) -> dict[str, Any]:
    question: Message = {"role": "user", "content": f"What is {a} + {b}?"}
    return {"prompt": [SYSTEM, question] if a % 2 else [question], "answer": a + b}


SUMS_OF = [(a, b) for a in range(2, 8) for b in range(1, 8)]
HELD_OUT = [row_of(*pair) for pair in SUMS_OF[::3]]


@dataclass
class Stack(HoneStack):
    model: Path = Path()

    def ended(self, name: str) -> dict[str, Any]:
        record = json.loads(self.hone("ls", name, "-o", "json"))
        assert record["status"] == "succeeded", record["error"]
        return record


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model, folder = real_model(), tmp_path_factory.mktemp("real")
    train = [row_of(*pair) for pair in SUMS_OF if pair not in SUMS_OF[::3]]
    files = {
        "train.jsonl": "".join(json.dumps(row) + "\n" for row in train),
        "held_out.jsonl": "".join(json.dumps(row) + "\n" for row in HELD_OUT),
        "talks.jsonl": "".join(json.dumps(row) + "\n" for row in TALKS),
        "reward.py": REWARD,
        "agent.py": AGENT,
        "sums.toml": SUMS.format(common=COMMON.format(model=model)),
        "talk.toml": TALK.format(common=COMMON.format(model=model)),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    with Stack(folder, own_environment(), model=model).running() as stack:
        yield stack


@pytest.fixture(scope="module")
def sums(stack: Stack) -> tuple[dict[str, Any], RunFolder]:
    stack.hone("run", "sums.toml")
    record = stack.ended("sums")
    return record, RunFolder(Path(record["run_dir"]))


@pytest.fixture(scope="module")
def talks(stack: Stack, sums: Any) -> tuple[list[dict[str, Any]], list[RolloutGroup]]:
    """What the agents got, and what the job recorded."""
    stack.hone("submit", "talk.toml")
    stack.hone("work", "agent.py", "--job", "talk")
    record = stack.ended("talk")
    got = [json.loads(line) for line in (stack.folder / "talks.out").read_text().splitlines()]
    return got, list(RunFolder(Path(record["run_dir"])).batch(1).groups)


@pytest.fixture(scope="module")
def tokenizer(stack: Stack) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(stack.model)


def plain(folder: Path, adapter: Path | None = None) -> Any:
    """Returns the model as transformers loads it, with PEFT's adapter if one is named."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return (PeftModel.from_pretrained(network, str(adapter)) if adapter else network).eval()


def logprobs_of(network: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0):
    import torch

    with torch.no_grad():
        logits_TV = network(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    logprobs_TV = (logits_TV / temperature).log_softmax(-1)
    return logprobs_TV.gather(1, torch.tensor([[*ids]]).T)[:, 0].numpy()


def placed(run: RunFolder, step: int) -> Iterator[tuple[RolloutGroup, Rollout, list[float]]]:
    """Each rollout of a step with the trainer's log-probs of its tokens, if it was trained on."""
    trained = run.trained(step)
    assert trained is not None
    for group, logprobs_GT in zip(run.batch(step).groups, trained.logprobs, strict=True):
        for rollout, logprobs_T in zip(group.rollouts, logprobs_GT, strict=True):
            yield group, rollout, list(logprobs_T)


def test_prompts_are_the_templates_ids_with_its_own_system_message_for_want_of_one(
    sums: tuple[dict[str, Any], RunFolder], tokenizer: Any
) -> None:
    batch = sums[1].batch(1)
    own = set()
    for prompt, group in zip(batch.prompts, batch.groups, strict=True):
        messages = prompt.row["prompt"]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert list(group.prompt_token_ids) == list(expected["input_ids"])
        own.add(has_own := messages[0]["role"] == "system")
        text = tokenizer.decode(list(group.prompt_token_ids))
        assert (DEFAULT_SYSTEM in text, text.count("<|im_start|>system")) == (not has_own, 1)
    assert own == {True, False}


def test_an_end_token_is_sampled_and_learned_and_a_cut_off_answer_has_none(
    sums: tuple[dict[str, Any], RunFolder], stack: Stack
) -> None:
    run = sums[1]
    metrics = {row.step: row.metrics for row in run.metrics()}
    ends = {"stop": 0, "length": 0}
    for step, weights in ((1, stack.model), (2, run.checkpoints / "step-000001")):
        network, num_trained = plain(weights), 0
        for group, rollout, logprobs in placed(run, step):
            ids = list(rollout.token_ids)
            ends[rollout.finish_reason] += 1
            assert (ids[-1] == END, END in ids[:-1]) == (rollout.finish_reason == "stop", False)
            assert len(rollout.logprobs) == len(logprobs) == len(ids)
            if ids[-1] == END:
                expected = logprobs_of(network, list(group.prompt_token_ids), ids)[-1]
                found = [logprobs[-1], rollout.logprobs[-1]]
                assert found == pytest.approx([expected] * 2, abs=1e-3)
            num_trained += len(ids)
        assert metrics[step]["tokens/trained"] == num_trained, "each has a loss, end tokens too"
    assert min(ends.values()) > 0, ends


def test_served_adapter_merged_checkpoint_peft_and_trainer_agree(
    sums: tuple[dict[str, Any], RunFolder], stack: Stack
) -> None:
    checkpoint = sums[1].checkpoints / "step-000001"
    networks = {
        "merged": plain(checkpoint),
        "peft": plain(stack.model, checkpoint / "adapter"),
        "base": plain(stack.model),
    }
    gaps: dict[str, float] = dict.fromkeys([*networks, "trainer"], 0.0)
    for group, rollout, logprobs in islice(placed(sums[1], 2), 0, None, 2):
        assert rollout.versions == (1,)
        found = {
            name: logprobs_of(network, list(group.prompt_token_ids), list(rollout.token_ids))
            for name, network in networks.items()
        }
        found["trainer"] = np.array(logprobs)
        for name, values in found.items():
            gap = np.abs(values - np.array(list(rollout.logprobs))).max()
            gaps[name] = max(gaps[name], float(gap))
    print(f"largest gap to the served adapter, in nats: {gaps}")
    assert gaps.pop("base") > 0.05, "the first step changed nothing"
    assert max(gaps.values()) < 1e-3


def test_held_out_accuracy_is_what_plain_transformers_comes_to(
    sums: tuple[dict[str, Any], RunFolder], tokenizer: Any
) -> None:
    import torch

    network = plain(sums[1].checkpoints / "step-000002")
    texts = []
    for row in HELD_OUT:
        asked = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt"
        )
        with torch.no_grad():
            ids = network.generate(**asked, max_new_tokens=10, do_sample=False)[0]
        texts.append(tokenizer.decode(ids[asked["input_ids"].shape[1] :], skip_special_tokens=True))
    numbers = [re.findall(r"\d+", text) for text in texts]
    right = [
        bool(found) and int(found[-1]) == row["answer"]
        for found, row in zip(numbers, HELD_OUT, strict=True)
    ]
    before, *_, after = (row.metrics for row in sums[1].metrics())
    print(f"held-out accuracy: {before['eval/pass@1']:.3f} -> {after['eval/pass@1']:.3f}")
    accuracy = float(np.mean(right))
    assert 0 < before["eval/pass@1"] < 1
    assert after["eval/pass@1"] == pytest.approx(accuracy)
    expected = accuracy + 0.001 * float(np.mean([len(text) for text in texts]))
    assert sums[0]["summary"]["eval_after"] == pytest.approx(expected), "other texts"


def retokenized(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    return tokenizer.encode(tokenizer.decode(ids))


def after_answer(tokenizer: Any, last_token: int, user: str) -> list[int]:
    """Returns the tokens of the template from the end of an answer to the head of the next one."""
    text = f"\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    return [*([] if last_token == END else [END]), *tokenizer.encode(text)]


def test_an_agents_conversation_is_recorded_in_the_tokens_that_were_sampled(
    talks: tuple[list[dict[str, Any]], list[RolloutGroup]], stack: Stack, tokenizer: Any
) -> None:
    got, groups = talks
    base = plain(stack.model)
    rows = {
        (*group.prompt_token_ids, *rollout.token_ids): (group, rollout)
        for group in groups
        for rollout in group.rollouts
    }
    assert len(got) == len(rows) == 8
    num_changed = 0
    for talk in got:
        ids: list[int] = []
        sampled: list[int] = []
        for number, answer in enumerate(talk["answers"]):
            asked = talk["messages"][: 2 * number + 1]
            given = (
                after_answer(tokenizer, ids[-1], asked[-1]["content"])
                if ids
                else tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
            )
            (choice,) = answer["choices"]
            ids += [*given, *choice["token_ids"]]
            sampled += [0] * len(given) + [1] * len(choice["token_ids"])
        group, rollout = rows[tuple(ids)]
        start = len(group.prompt_token_ids)
        assert list(rollout.sampled) == sampled[start:] and rollout.branches == ()
        own = logprobs_of(base, ids[:start], ids[start:], temperature=2.0)
        theirs = np.where(rollout.sampled, own, 0)
        assert list(rollout.logprobs) == pytest.approx(theirs.tolist(), abs=1e-3)
        num_changed += retokenized(tokenizer, ids) != ids
    print(f"{num_changed} of {len(got)} conversations have other tokens if tokenized from text")
    assert num_changed > 0


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([2797, 5365, END], id="hel+lo, where text gives hello"),
        pytest.param([1116, 26843, END], id="a blank line, part of which joins the head's"),
        pytest.param([142], id="half of a letter, cut off"),
    ],
)
async def test_an_answer_that_text_would_give_other_tokens_keeps_its_own(
    talks: Any, stack: Stack, tokenizer: Any, answer: list[int]
) -> None:
    asked: tuple[Message, ...] = ({"role": "user", "content": "Hi"},)
    prompt = tokenizer.apply_chat_template(list(asked), add_generation_prompt=True)["input_ids"]
    known = [*prompt, *answer]
    assert retokenized(tokenizer, known) != known
    text = tokenizer.decode(answer, skip_special_tokens=True)
    said: tuple[Message, ...] = ({"role": "assistant", "content": text},)
    request = GenerateRequest(
        prompt=(*asked, *said, {"role": "user", "content": "And?"}),
        known=ConversationPrefix(num_messages=2, token_ids=TokenIds(known)),
        sampling=Sampling(max_tokens=1),
    )
    async with Client("rollout", stack.urls["rollout"], binary=True) as client:
        group = await client.call("POST", "/generate", request, RolloutGroup, deadline_s=60)
    assert list(group.prompt_token_ids) == [*known, *after_answer(tokenizer, answer[-1], "And?")]
    assert group.forked == ""
