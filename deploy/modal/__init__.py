"""Hone on Modal: an app for each service, and `train.py`, which is a run of its own.

    modal deploy deploy/modal/rollout.py         samplers, each a Server with GPUs of its own
    modal deploy deploy/modal/reward.py          grading; programs run in Modal Sandboxes
    modal deploy deploy/modal/trainer.py         the trainer and the training loop, while jobs exist
    modal deploy deploy/modal/orchestrator.py    the jobs API, which starts the trainer
    modal deploy deploy/modal/trial.py           instead of these four: everything in one container
    modal run deploy/modal/train.py --model ...  one job, and nothing that stays

Shared by the apps: `common.py` (images, Volumes, resources), `inside.py` (code in containers, a
cluster included), `calls.py` (requests to Modal), `api.py` (the jobs API), `flags.py` (of `modal
run`).
"""
