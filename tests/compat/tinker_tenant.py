"""A program for Tinker's SDK that is one of several on one trainer: `MODEL SEED STEPS`. What it
trains on depends on the seed alone. It samples on the way, and last it prints what it saw, as
JSON."""

from __future__ import annotations

import json
import random
import sys
import time

import numpy as np
import tinker
from tinker import types

LOSSES = ("cross_entropy", "importance_sampling", "ppo")
PACE_S = 0.5


def tensor(values: list[float], dtype: type) -> types.TensorData:
    return types.TensorData.from_numpy(np.array(values, dtype=dtype))


def datum(draws: random.Random, loss: str, vocabulary: list[int]) -> types.Datum:
    ids = draws.choices(vocabulary, k=draws.randint(6, 16))
    inputs = {"weights": [draws.uniform(0, 1) for _ in ids[1:]]}
    if loss != "cross_entropy":
        inputs = {
            "logprobs": [draws.uniform(-3, -1) for _ in ids[1:]],
            "advantages": [draws.uniform(-1, 1) for _ in ids[1:]],
        }
    given = {name: tensor(values, np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": tensor(ids[1:], np.int64), **given},
    )


def main(base_model: str, seed: int, steps: int) -> None:
    draws, loss = random.Random(seed), LOSSES[seed % len(LOSSES)]
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=base_model, rank=4, seed=seed).result()
    vocabulary = [*range(3, 19)]
    prompt = types.ModelInput.from_ints(vocabulary)
    params = types.SamplingParams(max_tokens=8, temperature=1.0)
    first, first_scored, losses, lengths = None, [], [], []
    for step in range(steps):
        calls = [
            client.forward_backward([datum(draws, loss, vocabulary) for _ in range(num)], loss)
            for num in (3, 5)
        ]
        done = client.optim_step(types.AdamParams(learning_rate=(1 + seed) * 1e-3))
        losses += [one.result().metrics["loss:sum"] for one in calls]
        losses.append(done.result().metrics["grad_norm:mean"])
        if step % 3 == 0:
            sampler = client.save_weights_and_get_sampling_client()
            found = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
            lengths += [len(one.tokens) == len(one.logprobs) for one in found.sequences]
            if first is None:
                first, first_scored = sampler, sampler.compute_logprobs(prompt).result()
        time.sleep(PACE_S)
    last = [datum(random.Random(seed + 9), "cross_entropy", vocabulary) for _ in range(4)]
    told = client.forward(last, "cross_entropy").result()
    again = first.compute_logprobs(prompt).result()
    path = client.save_state("end").result().path
    print(
        json.dumps(
            {
                "losses": losses,
                "logprobs": [one["logprobs"].tolist() for one in told.loss_fn_outputs],
                "whole": all(lengths),
                "first": first_scored[1:],
                "apart": max(abs(a - b) for a, b in zip(first_scored[1:], again[1:], strict=True)),
                "path": path,
            }
        ),
        flush=True,
    )


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
