"""An example of each body and answer, as the OpenAPI documents show it: JSON by the name of the
model. Tests hold them to their models."""

from __future__ import annotations

from typing import Any

ID = "demo-0k2m7x4c9h1p5r8t2w6y"
TIME = 1763800000.0
PROMPT = {"index": 17, "content": "12 47 -> 59:", "row": {"numbers": [12, 47], "target": 59}}
REWARD = {"grader": "python_value", "params": {"target": "target", "numbers": "numbers"}}
JOB = {
    "name": "demo",
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "steps": 160,
    "data": {"train": "file-0123456789abcdef01234567", "eval": "owner/problems"},
    "rewards": [REWARD],
    "metadata": {"team": "math"},
}
SUMMARY = {
    "id": ID,
    "name": "demo",
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "status": "running",
    "created_at": TIME,
    "started_at": TIME + 2,
    "step": 40,
    "steps": 160,
    "eta_s": 95.5,
    "reward": 0.72,
    "attempts": 1,
    "metadata": {"team": "math"},
}
EVALUATION = {
    "id": "eval-7f3a",
    "models": [
        {"name": "base", "model": JOB["model"]},
        {"name": "demo:160", "model": f"/runs/{ID}/checkpoints/step-000160"},
    ],
    "job": {**JOB, "evaluation": {"samples": 4, "temperature": 0.6}},
}
SCORES = {"missing_rewards": 0.0, "errored_rollouts": 0.0}
BEFORE = {"mean": 0.31, "low": 0.27, "high": 0.35, "num_problems": 200}
AFTER = {"mean": 0.72, "low": 0.68, "high": 0.76, "num_problems": 200}
BETTER = {"mean": 0.41, "low": 0.38, "high": 0.44, "num_problems": 200}
PART = {"value": 1.0, "verdict": "ok", "detail": "evaluated to 59", "seconds": 0.01}
SCORE = {"value": 1.0, "parts": {"python_value": PART}}
GRADED = {
    "prompt_index": 17,
    "prompt": "12 47 -> 59:",
    "completion": " 12+47",
    "finish_reason": "stop",
    "versions": [40],
    "reward": 1.0,
    "parts": {"python_value": PART},
    "advantage": 0.94,
}
FENCED = {"job_id": ID, "attempt": 1763800002, "epoch": 1}
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
CHECKPOINT = {"step": 50, "path": f"/runs/{ID}/checkpoints/step-000050", "size_bytes": 988097824}
TRAINER = {
    "job_id": ID,
    "step": 40,
    "num_ranks": 1,
    "dtype": "bfloat16",
    "device": "cuda",
    "num_parameters": 494032768,
}
FILE = {
    "id": "file-0123456789abcdef01234567",
    "object": "file",
    "bytes": 52431,
    "created_at": 1763800000,
    "filename": "train.jsonl",
    "purpose": "fine-tune",
    "status": "processed",
}
KEY = {"name": "dashboard", "access": "read", "created_at": 1763800000}
GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "operation": "eq",
}
METHOD = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
FINE_TUNING_JOB = {
    "id": "sums-0k2m7x4c9h1p5r8t2w6y",
    "object": "fine_tuning.job",
    "created_at": 1763800000,
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "status": "queued",
    "training_file": FILE["id"],
    "method": METHOD,
    "seed": 3,
    "metadata": {"team": "math"},
}
FINE_TUNING_EVENT = {
    "id": "ftevent-1763800060000-0",
    "object": "fine_tuning.job.event",
    "created_at": 1763800060,
    "level": "info",
    "message": "step 1/160",
    "type": "metrics",
    "data": {"step": 1, "metrics": {"reward": 0.31}},
}
FINE_TUNING_CHECKPOINT = {
    "id": f"ftckpt-{ID}-50",
    "object": "fine_tuning.job.checkpoint",
    "created_at": 1763800300,
    "fine_tuned_model_checkpoint": CHECKPOINT["path"],
    "fine_tuning_job_id": ID,
    "metrics": {"step": 50.0, "reward": 0.78},
    "step_number": 50,
}
MODEL = {"id": ID, "object": "model", "created": 1763800000, "owned_by": "vllm"}
SAMPLER = {"url": "http://10.0.0.7:8001", "job_id": ID, "version": 41, "boot_id": "5f2a"}
REGISTERED = {"replica": "sampler-1", **SAMPLER, "lease_s": 15.0, "expires_at": TIME + 15}

PLAN = {
    "model": "/models/tiny",
    "num_parameters": 494032768,
    "num_trainable": 494032768,
    "dtype": "bfloat16",
    "gpus": "1xA10G",
    "fits": True,
    "placement": {
        "kind": "turns",
        "trainer_ranks": 1,
        "num_samplers": 1,
        "tensor_parallel": 1,
        "fits": True,
        "trainer_room_gib": 19.9,
        "sampler_room_gib": 13.2,
        "trainer": {
            "weights_gib": 0.92,
            "reference_gib": 0.0,
            "gradients_gib": 1.84,
            "optimizer_gib": 5.521,
            "activations_gib": 1.977,
            "logits_gib": 1.37,
            "update_gib": 2.761,
            "buffers_gib": 1.118,
            "overhead_gib": 1.0,
            "peak_gib": 13.746,
            "host_gib": 0.0,
        },
        "sampler": {
            "weights_gib": 0.92,
            "cache_gib": 3.0,
            "least_cache_gib": 0.375,
            "overhead_gib": 1.914,
            "cache_bytes_per_token": 12288,
            "sequences": 256,
        },
        "time": {
            "sample_s": 7.9,
            "train_s": 44.8,
            "sync_s": 0.2,
            "step_s": 52.9,
            "source": "tabled",
        },
        "settings": {"HONE_COLOCATE": "1", "HONE_TRAINER_RANKS": "1"},
    },
    "steps": 160,
    "prompt_tokens": 512,
    "completion_tokens": 512,
    "cost": {
        "currency": "USD",
        "per_hour": 1.1016,
        "per_step": 0.016,
        "hours": 2.351,
        "total": 2.59,
        "source": "HONE_PRICE_PER_HOUR",
    },
    "notes": ["prompts are taken to be of 512 tokens (--prompt-tokens)"],
}

EXAMPLES: dict[str, Any] = {
    # every service
    "Health": {"status": "ok", "service": "orchestrator"},
    "Readiness": {"ready": True, "dependencies": {"redis": {"ok": True, "detail": "ready"}}},
    "VersionInfo": {"service": "orchestrator", "hone": "0.1.0"},
    "WaitRequest": {"ids": ["f3a95c01b7d2e8460c1f9a35"], "wait_s": 20.0},
    "WaitResult": {"ids": ["f3a95c01b7d2e8460c1f9a35"], "busy": 3},
    "Accepted": {"operation": "f3a95c01b7d2e8460c1f9a35"},
    "NoBody": {},
    # jobs
    "SubmitRequest": {"job": JOB},
    "JobRecord": {
        **SUMMARY,
        "run_dir": f"/runs/{ID}",
        "data": {"train": "xxh3:9f6d2c40b1e7a853"},
        "job": JOB,
    },
    "JobList": {"jobs": [SUMMARY], "next_after": f"{ID}:1763700000.25"},
    "JobState": {"id": ID, "status": "running", "pause_requested": True},
    "JobDeleted": {"id": ID, "files": False},
    "ResumeRequest": {"set": ["memory.micro_batch_tokens=4096"]},
    "DryRun": {
        "job": JOB,
        "columns": ["prompt", "numbers", "target"],
        "num_train": 4000,
        "num_held_out": 200,
        "data": {"train": "xxh3:9f6d2c40b1e7a853"},
        "prompts": [
            {"index": 17, "content": "12 47 -> 59:", "text": "12 47 -> 59:", "num_tokens": 9}
        ],
        "plan": PLAN,
    },
    "Plan": PLAN,
    "EventList": {
        "events": [
            {
                "id": "1763800060000-0",
                "job_id": ID,
                "time": TIME + 60,
                "type": "step",
                "message": "step 1/160",
                "data": {"step": 1, "steps": 160, "metrics": {"reward": 0.31}},
            }
        ]
    },
    "MetricsList": {"rows": [{"step": 1, "metrics": {"reward": 0.31, "loss": 0.02}}]},
    "RolloutList": {"step": 40, "rollouts": [GRADED], "next_after": 1},
    "CheckpointList": {"checkpoints": [CHECKPOINT]},
    "CheckpointFiles": {
        "step": 50,
        "files": [
            {"name": "config.json", "size_bytes": 681, "crc32": 1404083027},
            {"name": "model.safetensors", "size_bytes": 988097824, "crc32": 2897351640},
            {"name": "trainer/manifest.json", "size_bytes": 5210, "crc32": 730211948},
        ],
    },
    "RegradeRequest": {"first_step": 1, "last_step": 2, "rewards": [REWARD], "num_examples": 1},
    "RegradeReport": {
        "steps": [
            {
                "step": 1,
                "num_rollouts": 384,
                "old_reward": 0.31,
                "new_reward": 0.33,
                "old_missing": 0,
                "new_missing": 0,
                "num_changed": 8,
                "flipped": [12, 40],
            }
        ],
        "examples": [{"step": 1, "position": 12, "old": {**GRADED, "reward": 0.0}, "new": GRADED}],
    },
    "Recovered": {"jobs": [{"id": ID, "status": "paused", "step": 40, "steps": 160}]},
    # files
    "EvaluationRequest": EVALUATION,
    "EvaluationReport": {
        "id": EVALUATION["id"],
        "temperature": 0.6,
        "seed": 0,
        "sets": [
            {
                "name": "",
                "source": "dataset 'owner/problems'",
                "num_problems": 200,
                "num_samples": 4,
                "models": [
                    {**SCORES, "name": "base", "metrics": {"pass@1": BEFORE}},
                    {
                        **SCORES,
                        "name": "demo:160",
                        "metrics": {"pass@1": AFTER},
                        "differences": {"pass@1": BETTER},
                    },
                ],
            }
        ],
    },
    "EvaluationState": {
        "id": EVALUATION["id"],
        "model": "demo:160",
        "number": 2,
        "num_models": 2,
        "num_done": 37,
        "num_problems": 200,
    },
    "EvaluationEnded": {"id": EVALUATION["id"], "ended": True},
    "UploadedFile": FILE,
    "FileList": {"object": "list", "data": [FILE], "has_more": False},
    "FileDeleted": {"id": FILE["id"], "object": "file", "deleted": True},
    # keys
    "CreateKey": {"name": "dashboard", "access": "read"},
    "CreatedKey": {**KEY, "secret": "hone_dashboard_" + 43 * "x"},
    "KeyList": {"keys": [KEY]},
    "KeyRevoked": {"name": "dashboard"},
    # OpenAI's API
    "CreateFineTuningJob": {
        "model": JOB["model"],
        "training_file": FILE["id"],
        "method": METHOD,
        "suffix": "sums",
        "seed": 3,
    },
    "FineTuningJob": FINE_TUNING_JOB,
    "FineTuningJobList": {"object": "list", "data": [FINE_TUNING_JOB], "has_more": False},
    "FineTuningEventList": {"object": "list", "data": [FINE_TUNING_EVENT], "has_more": True},
    "FineTuningCheckpointList": {
        "object": "list",
        "data": [FINE_TUNING_CHECKPOINT],
        "first_id": FINE_TUNING_CHECKPOINT["id"],
        "last_id": FINE_TUNING_CHECKPOINT["id"],
        "has_more": False,
    },
    "ValidateGraderRequest": {"grader": GRADER},
    "ValidatedGrader": {"grader": GRADER},
    "ServedModel": MODEL,
    "ServedModelList": {"object": "list", "data": [MODEL]},
    "CallRequest": {"model": ID, "prompt": "12 47 -> 59:", "max_tokens": 6},
    "CallAnswer": {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 1763800000,
        "model": ID,
        "choices": [{"index": 0, "text": " 12+47", "finish_reason": "stop"}],
    },
    # samplers
    "Registration": SAMPLER,
    "RegisteredSampler": REGISTERED,
    "SamplerList": {"samplers": [REGISTERED]},
    "Unregistered": {"replica": "sampler-1"},
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
    "PauseState": {"paused": True},
    "SleepRequest": FENCED,
    "SessionRecord": {"id": "agent-1", "conversations": []},
    "SessionDeleted": {"id": "agent-1"},
    # the trainer
    "TrainerJob": {**FENCED, "job": JOB},
    "TrainerState": TRAINER,
    "TrainStepRequest": {**FENCED, "step": 41, "examples": [EXAMPLE]},
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
    "Checkpoint": CHECKPOINT,
    # rewards
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
