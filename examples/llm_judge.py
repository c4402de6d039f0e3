"""A language model as the judge: the grader `llm_judge` with a rubric of your own.

    vllm serve Qwen/Qwen2.5-7B-Instruct --port 9000 &    # or any endpoint like OpenAI's
    HONE_JUDGE_URL=http://127.0.0.1:9000/v1 hone up
    python examples/llm_judge.py --judge Qwen/Qwen2.5-7B-Instruct

Where the judge is, and its key (HONE_JUDGE_API_KEY), are settings of the reward service; the job
names only the model. `budget_calls` bounds what it may cost. Verdicts come with a reason, which is
stored beside each completion.
"""

import argparse

import hone

ROWS = [
    {"prompt": [{"role": "user", "content": f"Explain {topic} to a child in two sentences."}]}
    for topic in ("rain", "a rainbow", "why the moon shines", "how bread rises")
]
RUBRIC = """A child of six asked for this explanation:

{{ sample.output_text }}

10: true, two short sentences, no word that needs explaining. 5: true, but too long or too hard.
0: wrong, empty, or not an explanation."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--judge", default="Qwen/Qwen2.5-7B-Instruct")
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--max-steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    judge = {
        "grader": "llm_judge",
        "params": {"model": args.judge, "rubric": RUBRIC, "budget_calls": 10_000},
    }
    trainer = hone.Trainer(
        model=args.model,
        reward_funcs=judge,
        train_dataset=ROWS,
        max_steps=args.max_steps,
        batch_size=args.batch_size,
        num_generations=4,
        max_completion_length=args.max_tokens,
    )
    output = trainer.train()
    print(f"{output.global_step} steps, the judge gave {output.metrics['reward']:.2f} of 1")
    part = trainer.run.rollouts()[0].parts["llm_judge"]
    print(f"one verdict: {part.value} because {part.detail!r}")


if __name__ == "__main__":
    main()
