"""Code that is graded by running it: the grader `code_tests` on opc-sft-stage2 of OpenCoder.

    python examples/code_with_tests.py
    python examples/code_with_tests.py --data rows.jsonl     # a file with the same columns

A row has a problem in `instruction` and assert statements in `testcase`. The program of each
completion runs in a sandbox, and its tests never meet it there. A second reward, a small one, is a
function of this file: it goes into the job as source.
"""

import argparse

import hone

HUB = "OpenCoder-LLM/opc-sft-stage2"


def defines(completions, entry_point, **columns):
    """Rewards a definition of the function that the tests call."""
    pairs = zip(completions, entry_point, strict=True)
    return [float(f"def {name}(" in completion[0]["content"]) for completion, name in pairs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-1.5B-Instruct")
    parser.add_argument("--data", default=HUB)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=1024)
    args = parser.parse_args()
    trainer = hone.Trainer(
        model=args.model,
        reward_funcs=[{"grader": "code_tests", "params": {"credit": "partial"}}, defines],
        reward_weights=[1.0, 0.1],
        train_dataset=args.data,
        data={
            "config": "educational_instruct" if args.data == HUB else None,
            "columns": {"prompt": "instruction", "tests": "testcase"},
        },
        system_prompt="Answer with one Python code block that has the whole solution.",
        max_steps=args.max_steps,
        batch_size=args.batch_size,
        num_generations=8,
        max_completion_length=args.max_tokens,
    )
    output = trainer.train()
    print(f"{output.global_step} steps, reward {output.metrics['reward']:.3f}")
    for rollout in trainer.run.rollouts()[:2]:
        earned = {name: part.value for name, part in rollout.parts.items()}
        print(f"{rollout.completion[:60]!r} earned {earned}")


if __name__ == "__main__":
    main()
