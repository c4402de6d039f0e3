"""Examples of the bodies of sampler, trainer and reward service."""

from __future__ import annotations

from typing import Any

from shared.wire.examples.openai import (
    CHECKPOINT,
    FENCED,
    GRADER,
    ID,
    JOB,
    PART,
    PROMPT,
    REWARD,
    TIME,
)

SCORE = {"value": 1.0, "parts": {"python_value": PART}}
ROLLOUT = {
    "text": " 12+47",
    "token_ids": [220, 717, 10, 2618],
    "logprobs": [-0.1, -0.4, -0.2, -0.05],
    "finish_reason": "stop",
    "spans": [{"version": 40, "start": 0}],
}
EXAMPLE = {
    "prompt_token_ids": [717, 220, 2618],
    "token_ids": ROLLOUT["token_ids"],
    "old_logprobs": ROLLOUT["logprobs"],
    "advantage": 0.94,
    "spans": ROLLOUT["spans"],
}
WEIGHTS = {
    **FENCED,
    "method": "disk",
    "version": 41,
    "digest": "6f1c2b7d90a34e58",
    "size_bytes": 988097824,
    "path": f"/runs/{ID}/weights/v41",
}
SERVING = {**FENCED, "version": 41, "digest": WEIGHTS["digest"], "model": JOB["model"]}
TRAINER = {
    "job_id": ID,
    "step": 40,
    "num_ranks": 1,
    "dtype": "bfloat16",
    "device": "cuda",
    "num_parameters": 494032768,
}
SAMPLER = {"url": "http://10.0.0.7:8001", "job_id": ID, "version": 41, "boot_id": "5f2a"}
STATE = {
    "service": "rollout",
    "url": "http://127.0.0.1:8001",
    "answered_at": TIME,
    "sampler": SERVING,
    "gauges": {"running_requests": 96.0, "running_tokens": 41210.0, "memory_bytes": 6.1e9},
}
REGISTERED = {"replica": "sampler-1", **SAMPLER, "lease_s": 15.0, "expires_at": TIME + 15}

SAMPLERS: dict[str, Any] = {
    "Registration": SAMPLER,
    "RegisteredSampler": REGISTERED,
    "SamplerList": {"samplers": [REGISTERED]},
    "Unregistered": {"replica": "sampler-1"},
    "ServiceState": STATE,
    "ServiceList": {"services": [STATE]},
    "GenerateRequest": {
        **FENCED,
        "min_version": 40,
        "prompt": "12 47 -> 59:",
        "sampling": {"n": 8, "max_tokens": 6},
    },
    "RolloutGroup": {"prompt_token_ids": [717, 220, 2618], "rollouts": [ROLLOUT]},
    "AbortRequest": FENCED,
    "Aborted": {"num_requests": 3},
    "ModelRequest": {"model": JOB["model"], **FENCED},
    "ServingWeights": SERVING,
    "WeightsRef": WEIGHTS,
    "CheckedWeights": {"version": 41, "replica": "sampler-1", "num_tensors": 290},
    "PauseRequest": {"mode": "keep"},
    "PauseState": {"paused": True, "status": "paused"},
    "CacheReset": {"success": True},
    "AdapterChanged": {"message": "Success: LoRA adapter added"},
    "LoadAdapterRequest": {"lora_name": "policy-v3", "lora_path": "runs/other/policy-v3"},
    "UnloadAdapterRequest": {"lora_name": "policy-v3"},
    "SleepRequest": FENCED,
}

TRAINERS: dict[str, Any] = {
    "TrainerJob": {**FENCED, "job": JOB},
    "TrainerState": TRAINER,
    "TrainStepRequest": {**FENCED, "step": 41, "examples": [EXAMPLE]},
    "ForwardRequest": {**FENCED, "step": 41, "examples": [EXAMPLE]},
    "ForwardResult": {"logprobs": [-0.41, -0.02]},
    "ForwardBackwardRequest": {
        **FENCED,
        "step": 7,
        "examples": [EXAMPLE],
        "loss": {"name": "cross_entropy"},
    },
    "ForwardBackwardResult": {"step": 7, "loss": 0.43, "logprobs": [-0.41, -0.02], "train_s": 0.2},
    "OptimStepRequest": {**FENCED, "step": 8, "optimization": {"learning_rate": 1e-4}},
    "OptimStepResult": {"step": 8, "grad_norm": 0.8, "num_calls": 1, "train_s": 0.1},
    "StepResult": {
        "step": 41,
        "loss": 0.02,
        "grad_norm": 0.8,
        "learning_rate": 1e-6,
        "num_examples": 1,
        "num_tokens": 4,
        "train_s": 0.3,
    },
    "PublishRequest": {**FENCED, "version": 41, "method": "disk"},
    "CheckpointRequest": {**FENCED, "step": 50},
    "ReleaseRequest": {**FENCED},
    "Released": {"job_id": FENCED["job_id"]},
    "Checkpoint": CHECKPOINT,
}

EPISODE = {
    "job_id": ID,
    "environment": {"file": "game.py", "source": "class Game: ...", "name": "Game"},
    "id": "41-7-3",
}
CALL = {"id": "call_1", "name": "guess", "arguments": '{"number": 59}'}
OPENED = {
    "observation": "Guess a number from 1 to 100.",
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "guess",
                "description": "Guesses the number.",
                "parameters": {
                    "type": "object",
                    "properties": {"number": {"type": "integer", "description": "The guess."}},
                    "required": ["number"],
                },
            },
        }
    ],
}

REWARDS: dict[str, Any] = {
    "OpenEpisode": {**EPISODE, "row": {"secret": 59}},
    "EpisodeOpened": OPENED,
    "StepEpisode": {**EPISODE, "turn": 0, "calls": [CALL]},
    "EpisodeStepped": {"results": [{"id": "call_1", "content": "right"}], "done": True},
    "CloseEpisode": EPISODE,
    "EpisodeClosed": {"has_reward": True, "reward": 1.0},
    "ValidateEnvironment": {"environment": EPISODE["environment"], "row": {"secret": 59}},
    "EnvironmentValidated": {**OPENED, "has_reward": True},
    "ScoreRequest": {
        "items": [{"prompt": "12 47 -> 59:", "completion": " 12+47", "row": PROMPT["row"]}],
        "rewards": [REWARD],
    },
    "ScoreResult": {"scores": [SCORE]},
    "ExecuteRequest": {"code": "x = 12 + 47", "expression": "x"},
    "Execution": {"verdict": "ok", "value": 59, "wall_s": 0.004, "cpu_s": 0.003},
    "GraderList": {
        "graders": [
            {
                "name": "exact_match",
                "description": "1 for the answer, else 0.",
                "params": {"type": "object"},
            }
        ]
    },
    "ValidateRequest": {"rewards": [REWARD], "columns": ["prompt", "numbers", "target"]},
    "Validated": {"rewards": ["python_value"]},
    "TryRequest": {"rewards": [REWARD], "prompts": [PROMPT]},
    "Tried": {"rewards": [{"reward": "math", "empty": 0.0, "reference": 1.0, "num_references": 4}]},
    "GraderRunRequest": {
        "grader": GRADER,
        "model_sample": "59",
        "item": {"answer": "59"},
    },
    "GraderRun": {
        "reward": 1.0,
        "metadata": {
            "name": "exact",
            "type": "string_check",
            "execution_time": 0.001,
            "errors": {"other_error": False},
            "part": {"value": 1.0},
        },
    },
}
