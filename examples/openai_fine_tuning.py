"""OpenAI's fine-tuning client, unmodified, against Hone: another address and nothing else.

    hone up
    python examples/openai_fine_tuning.py --model Qwen/Qwen2.5-0.5B-Instruct

Files, a grader object of OpenAI's, a job of method "reinforcement", its events, and a call of the
model that came out. `pip install openai` is all that the client's machine needs. docs/openai.md
says what each field does, and where Hone differs.
"""

import argparse
import io
import json
import os
import time

from openai import OpenAI

GRADER = {
    "type": "string_check",
    "name": "answer",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "operation": "like",
}


def rows(numbers: range) -> io.BytesIO:
    """Returns sums as a file: the chat in `messages`, the other columns for the grader."""
    lines = [
        {"messages": [{"role": "user", "content": f"{n} + {n} ="}], "answer": str(n + n)}
        for n in numbers
    ]
    file = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
    file.name = "rows.jsonl"
    return file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    url = os.environ.get("HONE_ORCHESTRATOR_URL", "http://127.0.0.1:8000")
    parser.add_argument("--url", default=url)
    args = parser.parse_args()
    key = os.environ.get("HONE_TOKEN", "none")
    client = OpenAI(base_url=f"{args.url}/v1", api_key=key)
    client.fine_tuning.alpha.graders.validate(grader=GRADER)
    train = client.files.create(file=rows(range(args.rows)), purpose="fine-tune")
    test = client.files.create(file=rows(range(100, 104)), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=args.model,
        training_file=train.id,
        validation_file=test.id,
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": GRADER, "hyperparameters": {"batch_size": 4}},
        },
        extra_body={"hone": {"sampling": {"max_tokens": args.max_tokens}}},
    )
    print(f"job: {job.id}")
    while job.finished_at is None:
        time.sleep(1)
        job = client.fine_tuning.jobs.retrieve(job.id)
    for event in reversed(list(client.fine_tuning.jobs.list_events(job.id, limit=5))[:5]):
        print(event.message)
    print(f"{job.status}: {job.trained_tokens} tokens, model {job.fine_tuned_model}")
    messages = [{"role": "user", "content": "3 + 3 ="}]
    answer = client.chat.completions.create(
        model=job.fine_tuned_model, messages=messages, max_tokens=8
    )
    print("3 + 3 =", answer.choices[0].message.content)


if __name__ == "__main__":
    main()
