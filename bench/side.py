"""The sides of a benchmark: each in a process of its own, which prints its measurements as lines of
JSON; the services that a benchmark serves on free ports; and the random models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from shared.http.service import Service

BEGINNINGS = ('{"', '["', '"')


@dataclass(frozen=True)
class Side:
    """A running side. `log` has its stderr; None: it goes to this process's stderr."""

    process: subprocess.Popen[str]
    log: Path | None

    def told(self) -> Any:
        """Returns the side's next line of JSON; vLLM may print other lines. Raises RuntimeError if
        the side has ended, with the last line of its log."""
        assert self.process.stdout
        for line in iter(self.process.stdout.readline, ""):
            if line.startswith(BEGINNINGS):
                return json.loads(line)
        raise RuntimeError(self.last_line() or f"it ended with {self.process.wait()}")

    def ask(self, question: Any) -> Any:
        """Writes a line of JSON to the side's stdin; returns its next line of JSON."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.told()

    def finish(self) -> None:
        """Closes the side's stdin and waits for its end. Raises RuntimeError if it fails."""
        assert self.process.stdin
        self.process.stdin.close()
        if code := self.process.wait():
            raise RuntimeError(f"it ended with exit code {code}: {self.last_line()}")

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log else []
        return lines[-1] if lines else ""


@contextlib.contextmanager
def running(
    module: str, *arguments: str, log: Path | None = None, env: dict[str, str] | None = None
) -> Generator[Side]:
    """Yields a running side, which is terminated at the end of the block."""
    with contextlib.ExitStack() as files:
        process = subprocess.Popen(
            command(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=files.enter_context(log.open("w")) if log else None,
            text=True,
            bufsize=1,
            env=env,
        )
    try:
        yield Side(process, log)
    finally:
        process.terminate()
        process.wait()


def run(module: str, *arguments: str, limit_s: float) -> dict[str, Any]:
    """Returns a side's last line of JSON. Raises RuntimeError if it fails."""
    line = command(module, *arguments)
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


@contextlib.asynccontextmanager
async def serving(service: Service) -> AsyncGenerator[str]:
    """Yields the URL of the service."""
    server = service.server(0)
    task = asyncio.create_task(server._serve())  # without its own signal handlers
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await task


def quiet() -> None:
    """Limits logs to errors."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))


def resident_bytes(line: str, pid: int | str = "self") -> int:
    """Returns `VmRSS` or `VmHWM` of a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(each.split()[1]) for each in status if each.startswith(f"{line}:")) * 1024


def random_model(hidden_size: int, *, seed: int = 0, **config: Any) -> Any:
    """Returns a float32 model of Qwen2's architecture with random weights."""
    import torch
    import transformers

    torch.manual_seed(seed)
    shape = {
        "hidden_size": hidden_size,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": max(1, hidden_size // 128),
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen2Config(**shape | config), attn_implementation="sdpa"
    )
