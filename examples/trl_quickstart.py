"""TRL's own quick start of GRPO, with two lines changed: the import, and `mode=`.

    python examples/trl_quickstart.py
    MODEL=/models/tiny DATA=rows.jsonl RECIPE='{"max_steps": 2}' python examples/trl_quickstart.py

`accuracy_reward` of TRL goes into the job as source: the reward service needs no TRL, and has the
math-verify that the function imports. RECIPE are parameters by TRL's names; without it, three
epochs are trained, as in TRL.
"""

import json
import os

from datasets import load_dataset
from trl.rewards import accuracy_reward

from hone import Local
from hone import Trainer as GRPOTrainer  # was: from trl import GRPOTrainer

MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-0.5B-Instruct")
DATA = os.environ.get("DATA")
RECIPE = json.loads(os.environ.get("RECIPE", "{}"))

if DATA:
    dataset = load_dataset("json", data_files=DATA, split="train")
else:
    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
    mode=Local(),  # new
    **RECIPE,
)
trainer.train()
