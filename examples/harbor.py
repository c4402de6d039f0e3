"""Task folders of Harbor as episodes: Harbor's command runs a task's container, its agent
terminus-2 calls the job's model, and the task's tests give the reward.

    uv tool install harbor            # needs Docker
    hone work -c 4 -- python examples/harbor.py tasks

The job has `kind = "worker"`, and its rows name folders below `tasks`, as in
{"prompt": "Make a file.", "task": "hello"}. The prompt is for people: Harbor gives the agent the
folder's own instruction.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    task = (root / json.load(sys.stdin)["task"]).resolve()
    if root not in task.parents:  # the job's author writes its rows, and a Dockerfile runs here
        sys.exit(f"the row's task is {str(task)!r}; expected a folder below {str(root)!r}")
    # files that the container wrote may be root's
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trial = ("harbor", "trial", "start", "--path", str(task), "--trials-dir", folder)
        # the agent takes OPENAI_BASE_URL and OPENAI_API_KEY, which `hone work` has set
        agent = ("--agent", "terminus-2", "--model", "openai/policy")
        subprocess.run([*trial, *agent], check=True, stdout=sys.stderr)
        (file,) = Path(folder).glob("*/result.json")
        result = json.loads(file.read_text())
    if result["verifier_result"] is None:  # Harbor exits with 0 all the same
        sys.exit(f"{task.name} was not graded: {result['exception_info']['exception_message']}")
    rewards = result["verifier_result"]["rewards"]
    print(json.dumps({"reward": rewards.pop("reward"), "metrics": rewards}))


if __name__ == "__main__":
    main()
