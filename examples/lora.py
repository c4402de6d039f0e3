"""LoRA without the package peft: `use_lora`, `lora_r`, `lora_alpha`, and a word with the result.

    python examples/lora.py
    python examples/lora.py --data gsm8k.jsonl --output-dir trained

Only the adapter is trained, and only the adapter goes to the sampler after each step. The
checkpoint is merged, so plain `transformers` loads it; the adapter as PEFT loads it is in its
folder `adapter/`. A `peft.LoraConfig` as `peft_config=` does the same.
"""

import argparse

import hone


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--data", default="openai/gsm8k")
    parser.add_argument("--output-dir", default="gsm8k-lora")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()
    on_hub = args.data == "openai/gsm8k"
    trainer = hone.Trainer(
        model=args.model,
        reward_funcs="math",
        train_dataset=args.data,
        data={"config": "main" if on_hub else None, "columns": {"prompt": "question"}},
        use_lora=True,
        lora_r=16,
        lora_alpha=32,
        max_steps=args.max_steps,
        batch_size=args.batch_size,
        num_generations=8,
        max_completion_length=args.max_tokens,
        output_dir=args.output_dir,
    )
    output = trainer.train()
    print(f"{output.global_step} steps; merged weights and adapter/ are in {args.output_dir}")
    print("2 + 3 =", trainer.run.chat("2 + 3 =", max_tokens=16))


if __name__ == "__main__":
    main()
