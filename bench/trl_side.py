"""TRL's side of a comparison: a process that trains with TRL's `GRPOTrainer` for the number of
steps in a line on stdin, prints their measurements, and waits for the next line. `Recipe` has the
settings of all sides.

    python -m bench.trl_side transformers|vllm FOLDER '{"num_prompts": 16, ...}' [SAVE]

FOLDER contains `model`, `train.jsonl` and `reward.py`. At the end of stdin the weights are saved in
the folder SAVE, if it is given.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
KV_CACHE_GIB = 1
CONFIG: dict[str, Any] = {
    "temperature": 1.0,
    "loss_type": "dapo",
    "epsilon": CLIP_LOW,
    "epsilon_high": CLIP_HIGH,
    "beta": 0.0,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": [],
}
"""The options that every `GRPOConfig` has here."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a training run, the same for every side. A step samples `group_size`
    completions of at most `max_tokens` for each of `num_prompts` rows, in the order of the file,
    and makes one optimizer step on all of them. `reward` is the function's name in `reward.py`.
    TRL's micro-batch has `rows` sequences; 0: all sequences of a step."""

    num_prompts: int
    group_size: int = 8
    max_tokens: int = 64
    learning_rate: float = 1e-6
    seed: int = 0
    reward: str = "reward"
    rows: int = 0

    @property
    def num_samples(self) -> int:
        """Completions of a step."""
        return self.num_prompts * self.group_size


class TimedReward:
    """The reward function, which also counts the completions of a step. And seconds of the step's
    stages, without the stages inside them."""

    def __init__(
        self, reward: Callable[..., list[float]], rows: Sequence[dict[str, Any]], recipe: Recipe
    ) -> None:
        self.__name__ = "reward"
        self._reward = reward
        self._prompts = [row["prompt"] for row in rows]
        self._recipe = recipe
        self._num_calls = 0
        self._running: list[float] = []
        self.stages: dict[str, float] = {}
        self.rewards: list[float] = []
        self.lengths: list[int] = []

    def __call__(
        self, prompts: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        size, group_size = self._recipe.num_prompts, self._recipe.group_size
        places = range(self._num_calls * size, (self._num_calls + 1) * size)
        expected = [self._prompts[place % len(self._prompts)] for place in places]
        if prompts[::group_size] != expected:
            raise RuntimeError(f"TRL does not take the rows in order: got {prompts[0]!r} first")
        self._num_calls += 1
        self.lengths = [len(ids) for ids in completion_ids]
        self.rewards = self._reward(prompts=prompts, **columns)
        return self.rewards

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, whose time is added to the stage."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._running.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                seconds, inside = time.perf_counter() - began, self._running.pop()
                if self._running:
                    self._running[-1] += seconds
                self.stages[stage] = self.stages.get(stage, 0.0) + seconds - inside

        call.__name__ = getattr(function, "__name__", stage)
        return call


class StepRequests:
    """Lets the trainer make as many steps as lines on stdin request, and prints each turn."""

    def __init__(self, measured: TimedReward, out: TextIO) -> None:
        self._measured = measured
        self._out = out
        self._steps: list[dict[str, Any]] = []
        self._began = 0.0
        self._wanted = 0

    def wait(self) -> bool:
        """Waits for the next turn; returns False at the end of stdin."""
        line = sys.stdin.readline()
        self._wanted = int(line or 0)
        self._steps = []
        self._measured.stages = {}
        self._began = time.perf_counter()
        return bool(line)

    def step_ended(self) -> bool:
        """Returns whether there are more steps."""
        now, measured = time.perf_counter(), self._measured
        seconds = now - self._began
        rest = seconds - sum(measured.stages.values())
        self._steps.append(
            {
                "seconds": seconds,
                "stages": measured.stages | {"train": rest},
                "reward": fmean(measured.rewards),
                "mean_length": fmean(measured.lengths),
                "num_trained": len(measured.lengths),
            }
        )
        self._began, measured.stages = now, {}
        if len(self._steps) < self._wanted:
            return True
        self.say({"steps": self._steps})
        return self.wait()

    def say(self, told: dict[str, Any]) -> None:
        self._out.write(json.dumps(told) + "\n")
        self._out.flush()


def train(generation: str, folder: Path, recipe: Recipe, save: Path | None, out: TextIO) -> None:
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    transformers.utils.logging.set_verbosity_error()
    if generation == "vllm":
        _prepare_vllm(recipe)
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    defined: dict[str, Any] = {}
    exec((folder / "reward.py").read_text(), defined)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    measured = TimedReward(defined[recipe.reward], rows, recipe)
    requests = StepRequests(measured, out)

    class Callback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            requests.say({"ready": True})
            control.should_training_stop = not requests.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not requests.step_ended()

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer: Any = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32"),
        reward_funcs=measured.timed("reward", measured),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=100_000,
            seed=recipe.seed,
            shuffle_dataset=False,
            per_device_train_batch_size=recipe.rows or recipe.num_samples,
            gradient_accumulation_steps=recipe.num_samples // (recipe.rows or recipe.num_samples),
            num_generations=recipe.group_size,
            max_completion_length=recipe.max_tokens,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="constant",
            use_vllm=generation == "vllm",
            vllm_importance_sampling_correction=False,
            save_strategy="no",
            disable_tqdm=True,
            **CONFIG,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Callback()],
    )
    trainer._generate_single_turn = measured.timed("generate", trainer._generate_single_turn)
    if generation == "vllm":
        vllm = trainer.vllm_generation
        vllm.sync_weights = measured.timed("sync", vllm.sync_weights)
    trainer.train()
    if save:
        trainer.model.save_pretrained(save)
        tokenizer.save_pretrained(save)


def _prepare_vllm(recipe: Recipe) -> None:
    """Gives vLLM the same options as Hone does where TRL has no setting: float32 (with TRL, vLLM
    chooses bfloat16, which most CPUs only emulate), and the same memory and number of sequences.
    And disables oneDNN's linear layers: they keep only packed weights, and TRL, which loads tensor
    by tensor, fails with "'Parameter' object has no attribute 'weight_loader'"."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # TRL reaches into the engine
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CPU_KVCACHE_SPACE=str(KV_CACHE_GIB),
        VLLM_LOGGING_LEVEL="ERROR",
    )
    from trl.generation import vllm_generation
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
    module: Any = vllm_generation
    arguments = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": recipe.num_samples}
    llm = module.LLM
    module.LLM = lambda **given: llm(**given | arguments)


def main() -> None:
    generation, folder, recipe = sys.argv[1], Path(sys.argv[2]), Recipe(**json.loads(sys.argv[3]))
    save = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    out = sys.stdout
    with redirect_stdout(sys.stderr):  # TRL prints as it likes
        train(generation, folder, recipe, save, out)


if __name__ == "__main__":
    main()
