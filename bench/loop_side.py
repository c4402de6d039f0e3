"""What the sides of `bench.loop` share, the model and the task; and TRL's side, a process of its
own that trains as many steps as a line on stdin asks for, says what they took, and waits.

    python -m bench.loop_side transformers|vllm FOLDER '{"num_layers": 4, ...}'
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

LEARNING_RATE = 1e-6
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
NUM_PROBLEMS = 2048
KV_CACHE_GIB = 1

REWARD = '''\
def reward(completions, **_):
    """The share of digits in a completion."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]
'''


@dataclass(frozen=True)
class Task:
    """A model of Qwen2's shape and the steps that it is trained by. Every prompt has the same
    length, and every completion `max_tokens`: the token that would end it is beyond the
    vocabulary. All prompts begin with the same `worked` tokens of examples, before a question of
    `question`; without, a prompt is a sum. TRL's micro-batch has `rows` sequences, or all."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_prompts: int
    group_size: int = 8
    max_tokens: int = 64
    worked: int = 0
    question: int = 0
    rows: int = 0

    @property
    def longest(self) -> int:
        """Tokens that the model takes."""
        return 512 if not self.worked else self.worked + self.question + self.max_tokens + 8

    @property
    def num_samples(self) -> int:
        """Completions of a step."""
        return self.num_prompts * self.group_size


def write_task(folder: Path, task: Task) -> int:
    """Writes the model, with random weights in float32, `train.jsonl` and `reward.py`. Returns how
    many parameters the model has."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from deploy.tiny_model import PAD_ID, make_tokenizer

    tokenizer: Any = make_tokenizer()
    tokenizer.model_max_length = task.longest
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    ends = {"pad_token_id": PAD_ID, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=tokenizer.eos_token_id,
        hidden_size=task.hidden_size,
        intermediate_size=task.intermediate_size,
        num_hidden_layers=task.num_layers,
        num_attention_heads=task.hidden_size // 64,
        num_key_value_heads=max(task.hidden_size // 128, 1),
        max_position_embeddings=task.longest,
        tie_word_embeddings=False,
        dtype="float32",
        **ends,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in _prompts(task))
    )
    (folder / "reward.py").write_text(REWARD)
    return model.num_parameters()


def _prompts(task: Task) -> list[str]:
    drawn = random.Random(0)
    if not task.worked:
        return [f"{drawn.randint(10, 99)}+{drawn.randint(10, 99)}=" for _ in range(NUM_PROBLEMS)]

    def text(length: int) -> str:
        return "".join(drawn.choices("0123456789+-*", k=length))

    examples = text(task.worked)
    return [f"{examples}{text(task.question)}" for _ in range(NUM_PROBLEMS)]


# --- TRL -----------------------------------------------------------------------------------------


class Counted:
    """The reward, which counts what it is given, and the seconds of TRL's generation."""

    def __init__(self, reward: Callable[..., list[float | None]]) -> None:
        self._reward = reward
        self.__name__ = "reward"
        self.num_tokens = self.num_completions = 0
        self.generate_s = 0.0

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float | None]:
        self.num_completions += len(completion_ids)
        self.num_tokens += sum(map(len, completion_ids))
        return self._reward(completions)

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generate_s += time.perf_counter() - began

        return call


class Turns:
    """Lets the trainer do the steps that lines on stdin ask for, and tells of each turn."""

    def __init__(self, counted: Counted, out: TextIO) -> None:
        self._counted = counted
        self._out = out
        self._ends: list[float] = []
        self._wanted = 0

    def wait(self) -> bool:
        """Waits for the next turn; returns False at the end of stdin."""
        line = sys.stdin.readline()
        self._counted.num_tokens = self._counted.num_completions = 0
        self._counted.generate_s = 0.0
        self._wanted = int(line or 0)
        self._ends = [time.perf_counter()]
        return bool(line)

    def step_ended(self) -> bool:
        """Returns whether there are more steps."""
        self._ends.append(time.perf_counter())
        if len(self._ends) <= self._wanted:
            return True
        pairs = zip(self._ends, self._ends[1:], strict=False)
        told = {
            "seconds": [end - began for began, end in pairs],
            "generate_s": self._counted.generate_s,
            "num_tokens": self._counted.num_tokens,
            "num_completions": self._counted.num_completions,
        }
        self.say(told)
        return self.wait()

    def say(self, told: dict[str, Any]) -> None:
        self._out.write(json.dumps(told) + "\n")
        self._out.flush()


def train(generation: str, folder: Path, task: Task, out: TextIO) -> None:
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    transformers.utils.logging.set_verbosity_error()
    if generation == "vllm":
        _prepare_vllm(task)
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    defined: dict[str, Any] = {}
    exec((folder / "reward.py").read_text(), defined)
    counted = Counted(defined["reward"])
    turns = Turns(counted, out)

    class Callback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.say({"ready": True})
            control.should_training_stop = not turns.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not turns.step_ended()

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    trainer: Any = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32"),
        reward_funcs=counted,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=100_000,
            per_device_train_batch_size=task.rows or task.num_samples,
            gradient_accumulation_steps=task.num_samples // (task.rows or task.num_samples),
            num_generations=task.group_size,
            max_completion_length=task.max_tokens,
            temperature=1.0,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            loss_type="dapo",
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            beta=0.0,
            use_vllm=generation == "vllm",
            vllm_importance_sampling_correction=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Callback()],
    )
    trainer._generate_single_turn = counted.timed(trainer._generate_single_turn)
    trainer.train()


def _prepare_vllm(task: Task) -> None:
    """Gives vLLM what Hone gives it, where TRL has no setting: float32 (TRL leaves vLLM to choose,
    and it takes bfloat16, which most CPUs only emulate), the same memory and number of sequences.
    And takes oneDNN's linear layers away: they keep packed weights only, and TRL, which loads
    tensor by tensor, ends with "'Parameter' object has no attribute 'weight_loader'"."""
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
    arguments = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": task.num_samples}
    llm = module.LLM
    module.LLM = lambda **given: llm(**given | arguments)


def main() -> None:
    generation, folder, task = sys.argv[1], Path(sys.argv[2]), Task(**json.loads(sys.argv[3]))
    out = sys.stdout
    with redirect_stdout(sys.stderr):  # TRL prints as it likes
        train(generation, folder, task, out)


if __name__ == "__main__":
    main()
