"""Examples of bodies in OpenAI's shape, and the job of all examples."""

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
PART = {"value": 1.0, "verdict": "ok", "detail": "evaluated to 59", "seconds": 0.01}
FENCED = {"job_id": ID, "attempt": 1763800002, "epoch": 1}
CHECKPOINT = {"step": 50, "path": f"/runs/{ID}/checkpoints/step-000050", "size_bytes": 988097824}

FILE = {
    "id": "file-0123456789abcdef01234567",
    "object": "file",
    "bytes": 52431,
    "created_at": 1763800000,
    "filename": "train.jsonl",
    "purpose": "fine-tune",
    "status": "processed",
}
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

OPENAI: dict[str, Any] = {
    "UploadedFile": FILE,
    "FileList": {"object": "list", "data": [FILE], "has_more": False},
    "FileDeleted": {"id": FILE["id"], "object": "file", "deleted": True},
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
}
