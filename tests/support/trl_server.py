"""TRL's own clients of a vLLM server, unmodified, and its `GRPOTrainer` with each. TRL and vLLM are
imported where they are used, which takes half a minute."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPTS = ("abc", "de", "fgh", "ij")
GROUP = 4


def odd_tokens(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [float(sum(id % 2 for id in ids)) for ids in completion_ids]


def vllm_client(url: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.generation.vllm_client import VLLMClient

        return VLLMClient(base_url=url)


def grpo_trainer(model: Path, folder: Path, **options: Any) -> Any:
    """Returns TRL's trainer of an adapter for the model. `config`, one of `options`, is added to
    its configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        config = GRPOConfig(
            str(folder),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=2 * GROUP,
            num_generations=GROUP,
            max_completion_length=8,
            max_steps=2,
            learning_rate=0.05,
            logging_steps=1,
            save_strategy="no",
            **options.pop("config", {}),
        )
        return GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=odd_tokens,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [*PROMPTS]}),
            peft_config=LoraConfig(r=4, target_modules="all-linear", bias="none"),
            **options,
        )


@dataclass
class AdapterRollouts:
    """TRL's `rollout_func`: publishes the adapter as TRL's asynchronous trainer does, in a folder
    for each step, and samples with it. `sampled` are the tokens of each step, with the sampler's
    log-probs and the trainer's own."""

    url: str
    folder: Path
    sampled: list[list[tuple[list[int], list[float], list[float]]]] = field(default_factory=list)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter
        from trl.experimental.async_grpo.vllm_client import VLLMClient

        name = f"trl-policy-v{len(self.sampled)}"
        path = str(self.folder / name)
        server = VLLMClient(self.url)
        server.wait_for_server_ready()
        server.pause()
        save_lora_adapter(trainer.model, trainer.accelerator, "default", path)
        server.load_lora_adapter(name, path)
        server.resume()
        ids = [trainer.processing_class.encode(prompt) for prompt in prompts]
        got = vllm_client(self.url).generate(
            ids, max_tokens=8, generation_kwargs={"model": name, "seed": 1}
        )
        logprobs = [[one for (one,) in of] for of in got["logprobs"]]
        theirs = [
            logprobs_of(trainer.model, [*prompt, *completion])[len(prompt) - 1 :]
            for prompt, completion in zip(ids, got["completion_ids"], strict=True)
        ]
        self.sampled.append([*zip(got["completion_ids"], logprobs, theirs, strict=True)])
        if len(self.sampled) > 1:
            server.unload_lora_adapter(f"trl-policy-v{len(self.sampled) - 2}")
        return {
            "prompt_ids": got["prompt_ids"],
            "completion_ids": got["completion_ids"],
            "logprobs": logprobs,
        }


def logprobs_of(network: Any, ids: list[int]) -> list[float]:
    """Returns the log-probs of all tokens but the first, by a Hugging Face model."""
    import torch

    with torch.no_grad():
        logprobs_TV = torch.log_softmax(network(torch.tensor([ids])).logits[0].float(), -1)
    return [logprobs_TV[t - 1, ids[t]].item() for t in range(1, len(ids))]
