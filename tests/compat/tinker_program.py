"""A program for Tinker's SDK: it learns three sums by cross-entropy, then by importance sampling
from its own samples, and prints what it saw. After each line it prints on the way, it waits for a
line from its caller, who may kill something meanwhile."""

from __future__ import annotations

import json
import sys

import numpy as np
import tinker
from tinker import types

STEPS = 12
SUMS = [("12 13 -> 25:", "12+13"), ("20 10 -> 10:", "20-10"), ("11 14 -> 154:", "11*14")]


def tensor(values: list[float], dtype: type) -> types.TensorData:
    return types.TensorData.from_numpy(np.array(values, dtype=dtype))


def datum(ids: list[int], num_prompt: int, **inputs: list[float]) -> types.Datum:
    given = {name: tensor(values, np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": tensor(ids[1:], np.int64), **given},
    )


def main(base_model: str) -> None:
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=base_model, rank=8, seed=5).result()
    tokenizer = client.get_tokenizer()
    data = []
    for prompt, answer in SUMS * 8:
        ids, num = tokenizer.encode(prompt + answer), len(tokenizer.encode(prompt))
        ids = [*ids, tokenizer.eos_token_id]
        weights = [0.0] * (num - 1) + [1.0] * (len(ids) - num)
        data.append(datum(ids, num, weights=weights))
    losses: list[float] = []
    for step in range(STEPS):
        first = client.forward_backward(data[step % 3 :], "cross_entropy")
        second = client.forward_backward(data[: 5 + step % 3], "cross_entropy")
        done = client.optim_step(types.AdamParams(learning_rate=2e-3))
        if step in (4, 8):
            print(step, flush=True)
            sys.stdin.readline()
        losses.append(sum(one.result().metrics["loss:sum"] for one in (first, second)))
        done.result()
    sampler = client.save_weights_and_get_sampling_client(name="learned")
    whole = data[0].model_input.to_ints()
    trained = client.forward(data[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
    apart = np.abs(np.array(scored[1:]) - np.array(trained.tolist()[:-1])).max()
    params = types.SamplingParams(max_tokens=6, temperature=1.0)
    listed = sampler.sample(
        prompt=types.ModelInput.from_ints(whole),
        num_samples=1,
        sampling_params=params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=len(tokenizer),
    ).result()
    (one,) = listed.sequences
    by_id = [dict(places) for places in one.topk_logprobs]
    own = [found[id] for found, id in zip(by_id, one.tokens, strict=True)] == [*one.logprobs]
    best = [places[0][1] for places in listed.topk_prompt_logprobs[1:]]
    own_prompt = listed.prompt_logprobs[1:]
    rewarded, answers = [], []
    for prompt, answer in SUMS:
        ids = tokenizer.encode(prompt)
        asked = types.ModelInput.from_ints(ids)
        found = sampler.sample(prompt=asked, num_samples=4, sampling_params=params).result()
        for one in found.sequences:
            text = tokenizer.decode(one.tokens, skip_special_tokens=True)
            answers.append(text == answer)
            zeros = [0.0] * (len(ids) - 1)
            reward = 1.0 if text == answer else -1.0
            rewarded.append(
                datum(
                    [*ids, *one.tokens],
                    len(ids),
                    logprobs=[*zeros, *one.logprobs],
                    advantages=[*zeros, *[reward] * len(one.tokens)],
                )
            )
    # more than the SDK sends at once: it splits them, and merges what comes back
    many = client.forward(data[:3] * 400, "cross_entropy").result()
    few = client.forward(data[:3], "cross_entropy").result()
    merged = many.metrics["loss:sum"] / few.metrics["loss:sum"], len(many.loss_fn_outputs)
    narrow = data[0].loss_fn_inputs
    twice = np.stack([np.array(narrow["target_tokens"].data), np.zeros(len(whole))], 1)
    weights = np.stack([np.array(narrow["weights"].data), np.zeros(len(whole))], 1)
    wide = types.Datum(
        model_input=data[0].model_input,
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(twice.astype(np.int64)),
            "weights": types.TensorData.from_numpy(weights.astype(np.float32)),
        },
    )
    of_both = client.forward([wide, data[1]], "cross_entropy").result().loss_fn_outputs
    first_of_both = np.array(of_both[0]["logprobs"].tolist())[:, 0].tolist()
    of_one = few.loss_fn_outputs[0]["logprobs"].tolist()
    marked = [
        types.Datum(
            model_input=one.model_input,
            loss_fn_inputs={
                **one.loss_fn_inputs,
                "sequence_ratio_mask": tensor(
                    [float(value != 0) for value in one.loss_fn_inputs["advantages"].data],
                    np.float32,
                ),
            },
        )
        for one in rewarded
    ]
    bounds = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    sequences = client.forward_backward(marked, "gspo", loss_fn_config=bounds).result()
    ratio = client.forward_backward(rewarded, "importance_sampling").result()
    client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    told = client.forward(data[:3], "cross_entropy").result()
    saved = client.save_state("end").result()
    twin = service.create_training_client_from_state_with_optimizer(saved.path).result()
    went_on = []
    for one in (client, twin):  # they share the trainer
        one.forward_backward(data[:6], "cross_entropy")
        one.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        found = one.forward(data[:3], "cross_entropy").result().loss_fn_outputs
        went_on.append([outputs["logprobs"].tolist() for outputs in found])
    print(
        json.dumps(
            {
                "losses": losses,
                "logprobs": [one["logprobs"].tolist() for one in told.loss_fn_outputs],
                "first_scored": scored[0],
                "apart": float(apart),
                "top_has_own": own,
                "merged": merged,
                "wide_is_the_same": float(np.abs(np.subtract(first_of_both, of_one)).max()),
                "sequence_loss": sequences.metrics["loss:sum"],
                "top_is_best": all(a >= b for a, b in zip(best, own_prompt, strict=True)),
                "num_top": [len(places or ()) for places in listed.topk_prompt_logprobs],
                "right": sum(answers) / len(answers),
                "advantages": sum(sum(one.loss_fn_inputs["advantages"].data) for one in rewarded),
                "importance_loss": ratio.metrics["loss:sum"],
                "path": saved.path,
                "twins_are_equal": went_on[0] == went_on[1],
            }
        ),
        flush=True,
    )


main(sys.argv[1])
