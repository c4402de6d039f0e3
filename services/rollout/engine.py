"""The interface of a sampling engine. The only real engine is vLLM's: `on_vllm/engine.py`, started
by `on_vllm/processes.py`.

The interface exists so that the service's own rules (versions, idempotency, faults) can be tested
without vLLM, and the settings checked before heavy imports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from starlette.types import ASGIApp

from shared.errors import BadRequest
from shared.wire import (
    BroadcastWeights,
    ChatRequest,
    EngineSpec,
    Logprobs,
    Message,
    Rollout,
    Sampling,
    SharedWeights,
    TokenIds,
)

if TYPE_CHECKING:
    from services.rollout.weights.adapters import LoadedAdapters


PauseMode = Literal["keep", "abort"]
"""The effect of a pause on requests under way: they are frozen, or ended."""


Constraint = Mapping[str, Any]
"""A limit on the tokens of an answer, in the engine's own form."""


class BadPrompt(BadRequest):
    """Nothing can be sampled after this prompt: a result for a job, not an error."""


class Overlong(BadPrompt):
    """The prompt leaves no tokens for a completion."""


def failed_rollout(error: str) -> Rollout:
    """Returns a failed rollout with its error. It is data, so the other rollouts of its group are
    kept."""
    return Rollout(text="", token_ids=TokenIds(), finish_reason="error", error=error)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter for an engine: PEFT's files in `folder`. `name` is its published name, and
    `number` belongs to one load of it."""

    name: str
    number: int
    version: int
    folder: Path


class Chat(Protocol):
    """The part of an engine for conversations, with OpenAI's types."""

    async def render(
        self, request: ChatRequest, messages: Sequence[Message], *, answering: bool
    ) -> str:
        """Returns the messages as the chat template renders them, with the request's tools and
        arguments; if `answering`, with the head of the next answer. Raises BadPrompt if the
        template fails."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of a part of a rendered text."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, special tokens included."""
        ...

    def special_text(self, token_id: int) -> str:
        """Returns a special token's text, and "" for any other token."""
        ...

    async def constraint(self, request: ChatRequest, prompt_token_ids: list[int]) -> Constraint:
        """Returns the limit on the tokens of the answer to a constrained request. Raises BadRequest
        if the engine does not support it."""
        ...

    async def parsed(
        self, request: ChatRequest, prompt_token_ids: list[int], rollouts: Sequence[Rollout]
    ) -> list[Message]:
        """Returns the completions as messages, with their calls of the request's tools. A
        completion without calls is a text. Raises BadRequest if there are tools and no parser."""
        ...


class Engine(Protocol):
    """A started engine. It samples `max_num_seqs` completions at once, and its cache holds
    `kv_cache_tokens` tokens of all of them together. `openai` answers `/models`, `/completions` and
    `/chat/completions` below its mount point, and the read-only routes of a vLLM server.
    `max_lora_rank` is the largest rank of adapters that the engine supports; 0: none. With
    `keeps_cache` new weights leave cached prefixes as they are, and requests under way continue
    from them. After the engine's process has died, every method raises StateLost."""

    max_model_len: int
    max_lora_rank: int
    vocab_size: int
    max_num_seqs: int
    kv_cache_tokens: int
    keeps_cache: bool
    dtype: str
    gpus: tuple[str, ...]
    folder: Path
    openai: ASGIApp
    chat: Chat

    def encode(
        self, prompt: str | tuple[Message, ...], template_args: Mapping[str, Any]
    ) -> list[int]:
        """Returns the prompt's token ids `[T]`; messages are rendered by the model's chat template,
        with `template_args`, up to the head of the answer. Raises BadPrompt if it fails."""
        ...

    def encode_answer(
        self,
        prompt: str | tuple[Message, ...],
        answer: str | Message,
        template_args: Mapping[str, Any],
    ) -> list[int]:
        """Returns the token ids `[T]` of a given answer after the prompt's
        (`groups.py`). Raises BadPrompt if it cannot follow the prompt."""
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
        num_top: int = 0,
        constraint: Constraint | None = None,
    ) -> tuple[Rollout, ...]:
        """Returns `sampling.n` completions `[G]`, sampled with the adapter, if one is given. With a
        `constraint` each token is drawn from the `MAX_KEPT` likeliest that it allows, or fewer, and
        the rollouts list them (`Rollout.kept_ids`); raises BadRequest if the engine cannot.
        Prompts share cached prefixes only under the same `salt`. Raises Conflict, code "stale", if
        weights of another `owner` sampled any token; "" accepts all. Completions that are not done
        after `deadline_s` seconds end with "timeout". Each has the `num_top` likeliest tokens of
        its places. Cancelling the call ends the sampling."""
        ...

    async def logprobs(self, token_ids: list[int], adapter: Adapter | None = None) -> list[float]:
        """Returns the log-probs `[T - 1]` of all tokens but the first, in nats, at temperature
        1."""
        ...

    async def top_logprobs(
        self, token_ids: list[int], adapter: Adapter | None, num_top: int
    ) -> tuple[list[float], TokenIds, Logprobs]:
        """Returns the log-probs of all tokens but the first, `[T - 1]`, and the `num_top` likeliest
        tokens in their places, `[(T - 1) num_top]`, with their log-probs."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Samples no further token until `resume`, and drops cached prefixes, unless the mode is
        "keep" and `keeps_cache` is set."""
        ...

    async def resume(self) -> None: ...

    async def load_files(self, folder: Path) -> None:
        """Loads the safetensors files of `folder` in place."""
        ...

    async def reset_cache(self) -> bool:
        """Drops cached prefixes. Returns False if requests under way still use some."""
        ...

    async def sleep(self) -> None:
        """Frees the memory of weights and cache, except on a CPU. All requests end, and the weights
        are lost. Raises BadRequest, and changes nothing, if the settings do not allow it."""
        ...

    async def wake_weights(self) -> None:
        """Allocates memory for weights again. They must then be loaded."""
        ...

    async def wake_cache(self) -> None:
        """Allocates memory for the cache again, after the weights were loaded."""
        ...

    async def meet(self, ref: BroadcastWeights | SharedWeights) -> None:
        """Meets the trainer, while the engine samples. Raises Failed, code "not_met", if they
        cannot meet; then nothing has changed."""
        ...

    async def receive(self, ref: BroadcastWeights | SharedWeights) -> None:
        """Loads the weights that the trainer sends, in place, after they have met. Raises Failed,
        code "not_loaded", if the engine's weights are unknown then, and StateLost if the engine had
        to be ended."""
        ...

    async def restart(self, folder: Path) -> None:
        """Starts a new engine process with the weights in `folder` and the same tokenizer. All
        requests are lost."""
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Loads one more adapter, while the engine samples. Raises Conflict, code "no_adapters",
        and changes nothing, if the engine refuses it."""
        ...

    async def unload_adapter(self, adapter: Adapter) -> None: ...

    def offer(self, adapters: LoadedAdapters) -> None:
        """Makes these adapters available, by name, to callers of `openai`."""
        ...

    async def adapter_digests(self, adapter: Adapter) -> dict[str, str]:
        """Returns the digest of each tensor of the adapter that the engine computes with, by PEFT's
        names. Tensors that cannot be read back are left out."""
        ...

    async def digests(self, until: Set[str] | None = None) -> dict[str, str]:
        """Returns the digest of each tensor that the engine computes with, by the checkpoint's
        names; with `until`, only up to the first turn that reads any of these. May take seconds.
        Raises BadRequest if they cannot be read back."""
        ...

    async def set_version(self, owner: str, version: int) -> None:
        """Labels every token sampled from now on with `version` of `owner`; None: of no job."""
        ...

    async def failure(self) -> str | None:
        """Returns why the engine cannot sample, or None."""
        ...

    def prompt_tokens(self) -> tuple[int, int]:
        """Returns the number of prompt tokens given to `sample`, and how many of them were in the
        prefix cache."""
        ...

    def num_running(self) -> int:
        """Returns how many completions are under way."""
        ...

    def num_running_tokens(self) -> int:
        """Returns the tokens of the completions under way and of their prompts: a prompt that
        several share counts for each."""
        ...

    async def stop(self) -> None: ...


class Starter(Protocol):
    """Finds models and starts engines for them."""

    async def preload(self) -> None:
        """Makes the first start faster. Raises Failed if no engine can start here."""
        ...

    async def find_model(self, spec: EngineSpec) -> Path:
        """Returns the folder of the model's config.json. Raises BadRequest if there is no such
        model."""
        ...

    async def start(self, spec: EngineSpec, folder: Path) -> Engine:
        """Starts an engine for the model in the given folder. Raises Failed with the root cause."""
        ...

    def stage(self) -> str | None:
        """Returns the stage of an engine that starts; None if it is not known."""
        ...

    def close(self) -> None: ...
