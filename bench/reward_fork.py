"""The same warm parent as a sandbox slot has, which only forks: no isolation, no limits. What a sandbox can hardly beat.

It talks as a slot does (`services/reward/sandbox/inside/job.py`), so that both are driven by the same code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from typing import Any

from services.reward.sandbox.inside import frames, program, zygote

FACTS: dict[str, Any] = {
    "began": True, "exit": 0, "limit": None, "wall_s": 0.0, "cpu_s": 0.0, "ooms": None, "peak_bytes": 0, "overflow": False,
}  # fmt: skip


def main() -> None:
    control = socket.socket(fileno=json.loads(sys.argv[1])["control_fd"])
    for name in zygote.WARM.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    frames.send(control, {"ready": True})
    while frames.receive(control) is not None:
        _, job = frames.receive_bytes(control), frames.receive(control)
        result = os.memfd_create("result")
        pid = os.fork()
        if not pid:
            program.run(job or {}, result)
        os.wait4(pid, 0)
        frames.send(control, FACTS)
        for text in (b"", b"", os.pread(result, 1 << 16, 0)):
            control.sendall(frames.pack_bytes(text))
        os.close(result)
