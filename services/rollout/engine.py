"""What the rollout service needs of a sampling engine. The one real engine is in `vllm_engine.py`.

This seam exists so that the service's own rules (versions, idempotency, faults) are tested without
loading vLLM, and so that nothing heavy is imported before the settings are known to be good.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from starlette.types import ASGIApp

from shared.wire import EngineSpec, Message, Rollout, Sampling


class Engine(Protocol):
    """A started engine. `openai` answers `/models`, `/completions` and `/chat/completions` under
    wherever it is mounted."""

    max_model_len: int
    vocab_size: int
    folder: Path
    openai: ASGIApp

    def encode(self, prompt: str | tuple[Message, ...]) -> list[int]:
        """Returns the prompt's token ids `[T]`; messages are rendered by the model's chat template,
        ready for the answer."""
        ...

    async def sample(
        self, prompt_token_ids: list[int], sampling: Sampling, salt: str
    ) -> tuple[Rollout, ...]:
        """Returns `sampling.n` completions `[G]`. Prompts share cached prefixes only under the same
        `salt`."""
        ...

    async def pause(self, *, abort: bool = False) -> None:
        """Samples no further token until `resume`, and forgets cached prefixes. Requests under way
        are kept, or aborted."""
        ...

    async def resume(self) -> None: ...

    async def load_files(self, folder: Path) -> None:
        """Loads the safetensors files of `folder` in place."""
        ...

    async def set_version(self, version: int) -> None:
        """Labels every token sampled from now on with `version`."""
        ...

    async def failure(self) -> str | None:
        """Returns why the engine cannot sample, or None."""
        ...

    def num_running(self) -> int:
        """Returns how many completions are under way."""
        ...

    async def stop(self) -> None: ...


StartEngine = Callable[[EngineSpec, Path], Awaitable[Engine]]
"""Starts an engine for the model in the given folder. Raises Failed with the root cause's
sentence."""

FindModel = Callable[[EngineSpec], Awaitable[Path]]
"""Returns the folder of the model's config.json. Raises BadRequest if there is no such model."""
