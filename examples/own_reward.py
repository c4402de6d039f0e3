"""A reward of your own that runs what the model wrote: a class of `hone.RewardEnvironment`.

    python examples/own_reward.py

`execute_batch_in_sandbox` runs programs of the model, each in a sandbox of its own, without network
and files. `execute_in_function` runs your own code in a process that can be ended, here a parser
that a strange text might keep busy. Both have limits, which the two configurations below set for
all calls. What a program returns is compared here, where it cannot redefine `==`.
"""

import argparse
import ast

import hone

ROWS = [
    {"prompt": f"Write a Python function f(x) that returns {what}. Only code.\n", "wanted": wanted}
    for what, wanted in (
        ("x squared", [0, 9, 16]),
        ("x doubled", [0, -6, 8]),
        ("x plus one", [1, -2, 5]),
        ("the absolute value of x", [0, 3, 4]),
    )
]
ARGUMENTS = (0, -3, 4)


def is_short(code: str) -> bool:
    return len(ast.dump(ast.parse(code))) < 1000


class RunsRight(hone.RewardEnvironment):
    """The share of right results, and a tenth more for a short program."""

    def __init__(self, bonus: float) -> None:
        super().__init__(
            sandbox=hone.SandboxConfig(timeout_s=5.0, cpu_s=1.0, memory_mib=256),
            function=hone.FunctionConfig(timeout_s=2.0),
        )
        self.bonus = bonus

    def score_batch(self, prompts, completions, wanted, **columns):
        calls = f"[f(x) for x in {ARGUMENTS}]"
        programs = [{"code": completion, "expression": calls} for completion in completions]
        runs = self.execute_batch_in_sandbox(programs)
        return [self.score_one(*each) for each in zip(runs, completions, wanted, strict=True)]

    def score_one(self, run, completion, wanted):
        if not run.ok or not isinstance(run.value, list):
            return 0.0, run.verdict
        pairs = zip(run.value, wanted, strict=False)
        right = sum(type(got) is int and got == want for got, want in pairs)
        short = self.execute_in_function(is_short, completion)
        return right / len(wanted) + self.bonus * (short.value is True), f"{right} right"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-0.5B")
    parser.add_argument("--max-steps", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    trainer = hone.Trainer(
        model=args.model,
        reward_funcs=RunsRight(bonus=0.1),
        train_dataset=ROWS,
        max_steps=args.max_steps,
        batch_size=4,
        num_generations=8,
        max_completion_length=args.max_tokens,
    )
    output = trainer.train()
    print(f"{output.global_step} steps, reward {output.metrics['reward']:.3f}")
    verdicts = {rollout.parts["RunsRight"].detail for rollout in trainer.run.rollouts()}
    print(f"verdicts: {sorted(verdicts)}")


if __name__ == "__main__":
    main()
