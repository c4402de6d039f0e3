"""The job of all examples, and its results."""

from __future__ import annotations

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
