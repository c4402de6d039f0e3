"""GSM8K by GRPO, wherever Hone runs: the job is the same, `--mode` says where.

    python examples/gsm8k_grpo.py                                    # this machine
    python examples/gsm8k_grpo.py --mode remote --url https://hone.example.org
    python examples/gsm8k_grpo.py --mode single-node --gpu A100      # one container on Modal
    python examples/gsm8k_grpo.py --mode distributed --gpu H100 --rollout-gpu A10G

`--reward math` (the default) is Hone's grader, `--reward own` the function below. `--data` and
`--eval-data` take files with the columns of openai/gsm8k, `question` and `answer`; HONE_TOKEN is
the token of a remote stack.
"""

import argparse
import re

import hone

SYSTEM_PROMPT = "Think step by step. Put the final answer, a number, into \\boxed{}."
HUB = "openai/gsm8k"


def own(completions, answer, **columns):
    """1 for the number after `####` of the row's worked answer, a little for any number."""
    rewards = []
    for completion, worked in zip(completions, answer, strict=True):
        found = re.findall(r"-?\d+", completion[0]["content"].replace(",", ""))
        wanted = worked.split("####")[-1].strip().replace(",", "")
        rewards.append(1.0 if found[-1:] == [wanted] else 0.1 if found else 0.0)
    return rewards


def mode(args):
    if args.mode == "remote":
        return hone.Remote(args.url)
    if args.mode == "single-node":
        return hone.SingleNode(args.gpu)
    if args.mode == "distributed":
        return hone.Distributed(args.gpu, args.rollout_gpu)
    return hone.Local()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    modes = ("local", "remote", "single-node", "distributed")
    parser.add_argument("--mode", choices=modes, default="local")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--gpu", default="A100")
    parser.add_argument("--rollout-gpu", default="A10G")
    parser.add_argument("--reward", choices=("math", "own"), default="math")
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--data", default=HUB)
    parser.add_argument("--eval-data", default=HUB)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=512)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    trainer = hone.Trainer(
        model=args.model,
        reward_funcs=own if args.reward == "own" else "math",
        train_dataset=args.data,
        eval_dataset=args.eval_data,
        data={"config": "main" if args.data == HUB else None, "columns": {"prompt": "question"}},
        system_prompt=SYSTEM_PROMPT,
        max_steps=args.max_steps,
        batch_size=args.batch_size,
        num_generations=8,
        max_completion_length=args.max_tokens,
        evaluation={"every": 50, "num_prompts": 200},
        mode=mode(args),
    )
    output = trainer.train()
    print(f"{output.global_step} steps; held out: {output.metrics.get('eval_after')}")
    print(f"checkpoint: {trainer.run.checkpoint()}")


if __name__ == "__main__":
    main()
