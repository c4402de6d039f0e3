"""The countdown game as an environment of `atroposlib`, run by the package's own command line:
`python atropos_countdown.py serve`. COUNTDOWN names its files, its group size and its URLs."""

from __future__ import annotations

import itertools
import json
import operator
import os
import re
from pathlib import Path
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
GIVEN = json.loads(os.environ["COUNTDOWN"])


def score(row: dict[str, Any], answer: str) -> float:
    """Returns 1 for an expression of both numbers that gives the target."""
    found = re.fullmatch(r"(\d+)([-+*])(\d+)", answer)
    if not found or sorted(map(int, found.group(1, 3))) != sorted(row["numbers"]):
        return 0.0
    return float(OPERATORS[found[2]](int(found[1]), int(found[3])) == row["target"])


class Countdown(BaseEnv):
    name = "countdown"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            tokenizer_name=GIVEN["model"],
            group_size=GIVEN["group_size"],
            rollout_server_url=GIVEN["rollout_server_url"],
            total_steps=-1,
            max_token_length=6,
            max_num_workers=24,
            use_wandb=False,
            steps_per_eval=0,
            wandb_name="countdown",
        )
        server = APIServerConfig(
            model_name="policy", base_url=GIVEN["base_url"], api_key="none", health_check=False
        )
        return config, [server]

    async def setup(self) -> None:
        lines = Path(GIVEN["train"]).read_text().splitlines()
        self.rows = itertools.cycle([json.loads(line) for line in lines])

    async def get_next_item(self) -> dict[str, Any]:
        return next(self.rows)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def collect_trajectories(self, item: dict[str, Any]):
        completions = await self.server.completion(
            prompt=item["prompt"], n=self.config.group_size, max_tokens=6, temperature=1.0
        )
        prompt = self.tokenizer.encode(item["prompt"])
        group: dict[str, Any] = {"tokens": [], "masks": [], "scores": []}
        for choice in completions.choices:
            ids = self.tokenizer.encode(choice.text)
            if choice.finish_reason == "stop":
                ids.append(self.tokenizer.eos_token_id)
            group["tokens"].append(prompt + ids)
            group["masks"].append([-100] * len(prompt) + ids)
            group["scores"].append(score(item, choice.text))
        return group, []


if __name__ == "__main__":
    Countdown.cli()
