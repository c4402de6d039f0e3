"""The same warm parent as a sandbox slot has, which only forks: no isolation, no limits. A sandbox
can hardly be faster. It speaks a slot's protocol (`services/reward/sandbox/inside/child.py`), so
that both are driven by the same code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from services.reward.sandbox.inside import frames, program, zygote


def main() -> None:
    control: int = json.loads(sys.argv[1])["control_fd"]
    for name in zygote.WARM.split():
        importlib.import_module(name)
    program.make_ready_to_fork()
    frames.send(control, {"ready": True})
    while (request := frames.receive(control)) is not None:
        stdin_size = request["stdin_size"]
        data = frames.exactly(control, stdin_size + request["program_size"]) or b""
        result = os.memfd_create("result")
        pid = os.fork()
        if not pid:
            program.run(json.loads(data[stdin_size:]), result)
        os.wait4(pid, 0)
        value = os.pread(result, 1 << 16, 0)
        facts = {"exit": 0, "limit": None, "wall_s": 0.0, "cpu_s": 0.0, "overflow": False}
        frames.send(control, {"facts": facts, "sizes": [0, 0, len(value)]})
        frames.send_bytes(control, value)
        os.close(result)
