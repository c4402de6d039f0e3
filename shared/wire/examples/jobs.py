"""Examples of the jobs API (records, plans, events, keys) and of agents that run elsewhere."""

from __future__ import annotations

from typing import Any

from shared.wire.examples.openai import CHECKPOINT, ID, JOB, PART, REWARD, TIME

PLAN = {
    "model": "/models/tiny",
    "num_parameters": 494032768,
    "num_trainable": 494032768,
    "learning_rate": 1e-6,
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
            "update_gib": 0.0,
            "buffers_gib": 1.49,
            "overhead_gib": 1.0,
            "peak_gib": 13.002,
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
FINDING: dict[str, Any] = {
    "code": "truncation",
    "level": "warning",
    "title": "31% of the completions of the last 10 steps were cut off at 512 tokens",
    "since_step": 31,
    "evidence": [{"metric": "completions/clipped_ratio", "steps": [39, 40], "values": [0.3, 0.32]}],
    "cause": "sampling.max_tokens ends completions before the model does",
    "remedy": "raise sampling.max_tokens",
    "keys": ["sampling.max_tokens"],
}
GROUP = {
    "prompt_index": 17,
    "prompt": "12 47 -> 59:",
    "first": 0,
    "rewards": [1.0, 0.0],
    "advantages": [0.94, -0.94],
    "finish_reasons": ["stop", "stop"],
    "num_tokens": [6, 6],
    "versions": [39],
    "spread": 0.7071,
    "replica": "rollout-1",
}
KEY = {"name": "dashboard", "access": "read", "created_at": 1763800000}

SCORED_DATA: dict[str, Any] = {
    "tokens": [[1, 5, 7], [1, 5, 8]],
    "masks": [[-100, -100, 7], [-100, -100, 8]],
    "scores": [1.0, 0.0],
}
JOBS: dict[str, Any] = {
    "SubmitRequest": {"job": JOB},
    "WithdrawRequest": {"key": "9f2c51d07ae84b36c0d1e5fa"},
    "Withdrawn": {"job": {"id": ID, "status": "cancelled", "cancel_requested": True}},
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
    "FindingList": {
        "job_id": ID,
        "status": "running",
        "step": 40,
        "well": False,
        "findings": [FINDING],
    },
    "MetricsColumns": {
        "steps": [1, 2],
        "columns": {"reward": [0.31, 0.34], "eval/reward": [None, 0.36]},
        "names": ["eval/reward", "loss", "reward"],
        "num_steps": 2,
    },
    "ExperimentReport": {
        "job_id": ID,
        "version": 40,
        "experiments": [
            {
                "name": "same_tokens",
                "sampler": "rollout-0",
                "agrees": True,
                "difference": 2.1e-06,
                "allowed": 0.001,
                "detail": "the trainer's and the sampler's log-probs of 63 tokens",
            }
        ],
    },
    "RolloutList": {"step": 40, "rollouts": [GRADED], "next_after": 1},
    "GroupList": {"step": 40, "groups": [GROUP], "steps": [39, 40]},
    "ProblemHistory": {"prompt_index": 17, "steps": [{"step": 40, "group": GROUP}]},
    "SyncList": {
        "syncs": [
            {
                "version": 40,
                "method": "shm",
                "digest": "xxh3-d9b49cbee1249461ba36141949c94ae4",
                "size_bytes": 988097824,
                "seconds": 0.61,
                "samplers": [
                    {"replica": "rollout-1", "load_s": 0.4, "paused_s": 0.2, "received_bytes": 0}
                ],
            }
        ]
    },
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
    "PushedGroup": {
        "key": "episode-17",
        "prompt_token_ids": [1, 5, 9],
        "rollouts": [
            {"token_ids": [7, 2], "logprobs": [-0.41, -0.02], "versions": 4, "reward": 1.0},
            {"token_ids": [8, 2], "logprobs": [-1.3, -0.05], "versions": 4, "reward": 0.0},
        ],
    },
    "RegisterEnv": {
        "max_token_length": 512,
        "desired_name": "countdown",
        "weight": 1.0,
        "group_size": 8,
    },
    "EnvRegistered": {
        "status": "success",
        "env_id": 0,
        "wandb_name": "countdown_0",
        "checkpoint_dir": "/runs/demo/checkpoints",
        "starting_step": 0,
        "checkpoint_interval": 20,
        "num_steps": 100,
    },
    "EnvId": {"env_id": 0},
    "ScoredData": SCORED_DATA,
    "ScoredDataList": [SCORED_DATA],
    "DataReceived": {"status": "received", "groups_processed": 1},
    "AtroposInfo": {"batch_size": 64, "max_token_len": 4096},
    "AtroposWandb": {"group": "demo", "project": None},
    "AtroposStatus": {"current_step": 4, "queue_size": 3},
    "EnvStatus": {
        "current_step": 4,
        "queue_size": 3,
        "env_weight": 1.0,
        "unallocated_fraction": 1.0,
        "self_queue_size": 3,
        "max_group_size": 8,
    },
    "GroupAccepted": {"job_id": ID, "number": 17},
    "GroupCounts": {
        "job_id": ID,
        "accepted": 17,
        "trained": 8,
        "waiting": 9,
        "dropped": 0,
        "version": 1,
        "next_step": 3,
        "room": 7,
    },
    "Recovered": {"jobs": [{"id": ID, "status": "paused", "step": 40, "steps": 160}]},
    "CreateKey": {"name": "dashboard", "access": "read"},
    "CreatedKey": {**KEY, "secret": "hone_dashboard_" + 43 * "x"},
    "KeyList": {"keys": [KEY]},
    "KeyRevoked": {"name": "dashboard"},
}

WORKER, LEASE = "host-7-4242", "kX2vJb0s7m1QeZr4aTgY9w"

AGENTS: dict[str, Any] = {
    "SessionRecord": {"name": "task-1", "job_id": "countdown-1", "group": None, "waits": 1},
    "LeaseEpisodes": {"worker": WORKER, "num": 4, "wait_s": 10.0},
    "LeasedEpisodes": {
        "episodes": [
            {
                "id": LEASE,
                "job_id": ID,
                "row": {"prompt": "12 47 -> 59:", "target": 59},
                "prompt": "12 47 -> 59:",
                "path": "/v1",
                "api_key": "sk-hone-...",
                "deadline_s": 1800.0,
                "lease_s": 15.0,
            }
        ]
    },
    "RenewLeases": {"worker": WORKER, "ids": [LEASE]},
    "LeasesRenewed": {"unwanted": []},
    "EpisodeResult": {"reward": 1.0, "metrics": {"guesses": 3.0}},
    "ResultTaken": {"id": LEASE, "taken": True},
}
