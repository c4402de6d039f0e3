"""What the rollout service needs of a sampling engine. The one real engine is vLLM's, in
`on_vllm/engine.py`, and what starts it in `on_vllm/starter.py`.

This seam exists so that the service's own rules (versions, idempotency, faults) are tested without
loading vLLM, and so that nothing heavy is imported before the settings are known to be good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import ASGIApp

from shared.errors import BadRequest
from shared.wire import (
    BroadcastWeights,
    ChatRequest,
    EngineSpec,
    Message,
    Rollout,
    Sampling,
    SharedWeights,
)
from shared.wire.packed import TokenIds

if TYPE_CHECKING:
    from services.rollout.weights.adapters import LoadedAdapters


class BadPrompt(BadRequest):
    """Nothing can be sampled after this prompt: one prompt's fault, not the caller's."""


class Overlong(BadPrompt):
    """The prompt leaves no room for a completion."""


def failed_rollout(error: str) -> Rollout:
    """Returns a rollout that went wrong, and why: data, so that the rest of its group is kept."""
    return Rollout(text="", token_ids=TokenIds(), finish_reason="error", error=error)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, PEFT's files in `folder`, as it is asked of an engine. `name` is the one it
    was published under; `number` is of this load of it alone."""

    name: str
    number: int
    version: int
    folder: Path


@dataclass(frozen=True)
class Answer:
    """What was answered in a chat: `body` to OpenAI's client, `rollout` as tokens. `message` is
    that of the body."""

    body: dict[str, Any]
    message: Message
    rollout: Rollout


class Chat(Protocol):
    """What recorded conversations need of an engine, in OpenAI's shapes."""

    async def render(
        self, request: ChatRequest, messages: Sequence[Message], *, answering: bool
    ) -> str:
        """Returns what the chat template makes of the messages, with the request's tools and
        arguments; if `answering`, ready for the answer. Raises BadPrompt where that does not
        work."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of a part of a rendered text."""
        ...

    def special_text(self, token_id: int) -> str:
        """Returns a special token's text, and "" for any other token."""
        ...

    async def answer(
        self,
        request: ChatRequest,
        prompt_token_ids: list[int],
        *,
        owner: str,
        salt: str,
        adapter: Adapter | None = None,
    ) -> Answer:
        """Returns the answer that is sampled after exactly these tokens; the request's messages
        mean nothing here. `owner`, `salt` and `adapter` are those of `Engine.sample`. Raises
        BadRequest or NotFound for what the engine refuses, and Failed for a completion that went
        wrong."""
        ...


class Engine(Protocol):
    """A started engine. It samples `max_num_seqs` completions at once, and its cache holds
    `kv_cache_tokens` tokens of all of them together. `openai`
    answers `/models`, `/completions` and `/chat/completions` under wherever it is mounted.
    `max_lora_rank` is the largest rank of adapters that it takes; 0: it takes none. Whatever is
    asked of one whose process has died raises StateLost."""

    max_model_len: int
    max_lora_rank: int
    vocab_size: int
    max_num_seqs: int
    kv_cache_tokens: int
    dtype: str
    gpus: tuple[str, ...]
    folder: Path
    openai: ASGIApp
    chat: Chat

    def encode(
        self, prompt: str | tuple[Message, ...], template_args: Mapping[str, Any]
    ) -> list[int]:
        """Returns the prompt's token ids `[T]`; messages are rendered by the model's chat template,
        with `template_args`, ready for the answer. Raises BadPrompt where that does not work."""
        ...

    async def sample(
        self,
        prompt_token_ids: list[int],
        sampling: Sampling,
        *,
        owner: str,
        salt: str,
        deadline_s: float | None = None,
        adapter: Adapter | None = None,
    ) -> tuple[Rollout, ...]:
        """Returns `sampling.n` completions `[G]`, by the model with the adapter on, if one is
        given. Prompts share cached prefixes only under the same `salt`. Raises Conflict, code
        "stale", if weights of another `owner` sampled any token; "" takes all. Completions that are
        not done after `deadline_s` seconds end there, as "timeout". Cancelling it ends the
        sampling."""
        ...

    async def logprobs(self, token_ids: list[int], adapter: Adapter | None = None) -> list[float]:
        """Returns the log-probs `[T - 1]` of all tokens but the first, in nats, at temperature
        1."""
        ...

    async def pause(self, *, abort: bool = False) -> None:
        """Samples no further token until `resume`, and forgets cached prefixes. Requests under way
        are kept, or aborted."""
        ...

    async def resume(self) -> None: ...

    async def load_files(self, folder: Path) -> None:
        """Loads the safetensors files of `folder` in place."""
        ...

    async def sleep(self) -> None:
        """Frees the memory of weights and cache; on a CPU nothing is freed. All that is under way
        ends. Raises BadRequest where it is not set up to."""
        ...

    async def wake_weights(self) -> None:
        """Takes memory for weights again, which are to be loaded then."""
        ...

    async def wake_cache(self) -> None:
        """Takes memory for the cache again, once the weights are loaded."""
        ...

    async def meet(self, ref: BroadcastWeights | SharedWeights) -> None:
        """Meets the trainer, while it samples. Raises Failed, code "not_met", if that cannot be:
        then nothing has changed."""
        ...

    async def receive(self, ref: BroadcastWeights | SharedWeights) -> None:
        """Loads in place what the trainer sends, once they have met. Raises Failed, code
        "not_loaded", if something else is loaded then, and StateLost if the engine had to be
        ended."""
        ...

    async def restart(self, folder: Path) -> None:
        """Starts anew from the model in `folder`, with the same tokenizer. What is under way is
        lost."""
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Loads an adapter beside those that it has, while it samples. Raises Conflict, code
        "no_adapters", and is as it was, if it does not take it."""
        ...

    async def unload_adapter(self, adapter: Adapter) -> None: ...

    def offer(self, adapters: LoadedAdapters) -> None:
        """Lets callers of `openai` name these adapters."""
        ...

    async def adapter_digests(self, adapter: Adapter) -> dict[str, str]:
        """Returns the digest of each tensor of the adapter that it computes with, by PEFT's names,
        and without those that cannot be read back."""
        ...

    async def digests(self) -> dict[str, str]:
        """Returns the digest of each tensor that it computes with, by the checkpoint's names. May
        take seconds. Raises BadRequest where they cannot be read back."""
        ...

    async def set_version(self, owner: str, version: int) -> None:
        """Labels every token sampled from now on with `version` of `owner`."""
        ...

    async def failure(self) -> str | None:
        """Returns why the engine cannot sample, or None."""
        ...

    def prompt_tokens(self) -> tuple[int, int]:
        """Returns how many tokens the prompts that `sample` was given had, and how many of them
        were in the prefix cache."""
        ...

    def num_running(self) -> int:
        """Returns how many completions are under way."""
        ...

    async def stop(self) -> None: ...


class Starter(Protocol):
    """Finds models and starts engines for them."""

    async def preload(self) -> None:
        """Does ahead what the first start would otherwise do. Raises Failed if no engine can start
        here."""
        ...

    async def find_model(self, spec: EngineSpec) -> Path:
        """Returns the folder of the model's config.json. Raises BadRequest if there is no such
        model."""
        ...

    async def start(self, spec: EngineSpec, folder: Path) -> Engine:
        """Starts an engine for the model in the given folder. Raises Failed with the root cause's
        sentence."""
        ...

    def stage(self) -> str | None:
        """Returns what an engine that starts is at; None: not known."""
        ...

    def close(self) -> None: ...
