"""Every attack of `tests/support/sandbox_attacks.py` on the reward service of a container, from
inside it. `program` is run there, by its Python, after that file's text.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from tests.support import sandbox_attacks


def run_all() -> None:
    """Prints how many ended as they must, and each other one."""
    import json
    import os
    import urllib.request

    after = {"code": "import os", "expression": "[6 * 7, os.listdir('/tmp')]"}
    token = open(os.environ["HONE_TOKEN_FILE"]).read()  # noqa: PTH123, SIM115
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}

    def execute(body):  # type: ignore
        request = urllib.request.Request(
            "http://127.0.0.1:8003/execute", json.dumps(body).encode(), headers
        )
        return json.load(urllib.request.urlopen(request, timeout=120))

    calls = [{"inputs": {"call": list(call)}} for call in CALLS.values()]  # type: ignore # noqa: F821
    extra = [{}] * len(ATTACKS) + calls  # type: ignore # noqa: F821
    right = 0
    for attack, more in zip([*ATTACKS, *KERNEL], extra, strict=True):  # type: ignore # noqa: F821
        body = {"code": attack.code, "expression": attack.expression, **attack.limits, **more}
        ended = execute(body)
        ends = (attack.ends,) if isinstance(attack.ends, str) else attack.ends
        compared = ended["verdict"] == "ok" and None not in (attack.expression, attack.value)
        is_right = ended["verdict"] in ends
        is_right &= not compared or ended["value"] == attack.value
        # Docker's own filter ends a process for a call of another architecture
        is_right |= attack in KERNEL and "SIGSYS" in ended["stderr"]  # type: ignore # noqa: F821
        left = execute(after)
        is_right &= left.get("value") == [42, []]
        right += is_right
        if not is_right:
            print(f"{attack.name}: expected {ends} {attack.value!r}, got {ended}, then {left}")
    print(right, "of", len(extra))


def program() -> str:
    """Returns the text that Python in the container is given."""
    text = Path(sandbox_attacks.__file__).read_text()
    return f"{text}\n\n{inspect.getsource(run_all)}\n\nrun_all()\n"
