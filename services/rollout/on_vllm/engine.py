"""The real engine: vLLM's AsyncLLM.

Importing this module imports vLLM (about 15 s), so only `VllmStarter` does, in a thread.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Coroutine, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.types import ASGIApp
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import TokensInput
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from services.rollout.engine import Adapter, Chat, Constraint, PauseMode
from services.rollout.groups import answer_ids, rendered
from services.rollout.on_vllm.arguments import (
    can_sleep,
    end_ids,
    engine_args,
    gives_masks,
    load_tokenizer,
    start,
)
from services.rollout.on_vllm.completions import (
    VllmChat,
    lora_request,
    own_logprobs,
    rollout,
    sampling_params,
    text_of,
    top,
)
from services.rollout.on_vllm.inside_transfer import transfer_spec
from services.rollout.on_vllm.openai_routes import openai_app
from services.rollout.on_vllm.processes import freeze_heap, root_cause, stop_children
from services.rollout.running import label
from services.rollout.weights.adapters import LoadedAdapters
from shared.errors import BadRequest, Conflict, Failed, HoneError, StateLost, Unavailable
from shared.host.processes import run_in_thread
from shared.job.sampling import MAX_KEPT
from shared.settings import Settings
from shared.weights.meeting import LOADING_DEADLINES, MEETING_DEADLINES
from shared.wire import (
    BroadcastWeights,
    EngineSpec,
    Logprobs,
    Message,
    Rollout,
    Sampling,
    SharedWeights,
    TokenIds,
)

R = TypeVar("R")


STOP_S = 15.0
"""Seconds for a graceful end of an engine, which takes one or two, and ten on a busy machine."""

NO_MASKS = (
    "a forced call of a tool, 'parallel_tool_calls' false and a schema limit which tokens can be "
    "sampled, and this sampler's engine does not return these tokens: on a GPU it does for a job "
    f"with sampling.top_k (1 to {MAX_KEPT}), and on a CPU with HONE_TENSOR_PARALLEL_SIZE 1"
)

AHEAD = -1
"""vLLM's priority for the canary, ahead of all samples."""


MEET_CHECK_S = 0.05
"""Seconds between two checks whether vLLM's processes have met the trainer."""

LIFE_CHECK_S = 0.25
"""Seconds between two checks that vLLM's process lives, while a call waits for its answer."""


class VllmEngine:
    """One AsyncLLM. Built in a thread; used from the event loop only."""

    keeps_cache = False

    def __init__(self, spec: EngineSpec, folder: Path, settings: Settings, errors: Path) -> None:
        self._errors = errors
        self._spec = spec
        self._settings = settings
        self._tokenizer = load_tokenizer(spec)
        self._llm = start(engine_args(spec, settings))
        self._ends = end_ids(self._tokenizer, self._llm.model_config)
        self._request_ids = itertools.count()
        self._ended = set[int]()  # requests that their deadline ended
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self.folder = folder
        self.max_model_len: int = self._llm.model_config.max_model_len
        self.vocab_size: int = self._llm.model_config.get_vocab_size()
        self.kv_cache_tokens: int = self._llm.vllm_config.cache_config.kv_cache_size_tokens or 0
        self.dtype = str(self._llm.model_config.dtype).removeprefix("torch.")
        lora = self._llm.vllm_config.lora_config
        self.max_lora_rank: int = lora.max_lora_rank if lora else 0
        self.max_num_seqs: int = self._llm.vllm_config.scheduler_config.max_num_seqs
        self._adapters: LoadedAdapters | None = None
        self.openai: ASGIApp
        self.chat: Chat
        self.openai, self.chat = self._entrypoints()
        self.gpus: tuple[str, ...] = ()
        freeze_heap()

    async def find_gpus(self) -> None:
        uuids = await self._answer(self._llm.collective_rpc("gpu_uuid"))
        self.gpus = tuple(gpu for gpu in uuids if gpu)

    def offer(self, adapters: LoadedAdapters) -> None:
        self._adapters = adapters
        self.openai, self.chat = self._entrypoints()

    def encode(
        self, prompt: str | tuple[Message, ...], template_args: Mapping[str, Any]
    ) -> list[int]:
        """Returns token ids `[T]`. Text gets the tokenizer's special tokens; a template writes its
        own."""
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        text = rendered(self._tokenizer, prompt, template_args, answering=True)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_answer(
        self,
        prompt: str | tuple[Message, ...],
        answer: str | Message,
        template_args: Mapping[str, Any],
    ) -> list[int]:
        return answer_ids(self._tokenizer, prompt, answer, template_args, self._ends)

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
        """Returns the completions `[G]`, as one request of n: n requests cost 15 % more. A request
        keeps its adapter from its first token to its last."""
        if constraint is not None:
            sampling = self._bounded(sampling)
        name = next(self._request_ids)
        ending = asyncio.create_task(self._end_after(name, deadline_s)) if deadline_s else None
        try:
            params = sampling_params(sampling, num_top, constraint)
            params.detokenize = bool(sampling.stop)
            output = await self._last_output(prompt_token_ids, params, salt, name, adapter=adapter)
            ended_s = deadline_s if name in self._ended else None
        finally:
            if ending:
                ending.cancel()
            self._ended.discard(name)
        has_masks = self._spec.sampling_masks or constraint is not None
        masked = has_masks and sampling.truncates
        rollouts: list[Rollout] = []
        for one in output.outputs:
            if not params.detokenize:
                one.text = self._text_of(prompt_token_ids, one)
                await asyncio.sleep(0)  # long texts take milliseconds each
            rollouts.append(rollout(one, owner, adapter, ended_s, masked=masked, num_top=num_top))
        return tuple(rollouts)

    def _bounded(self, sampling: Sampling) -> Sampling:
        """Returns the sampling with a top_k that bounds the masks. Raises BadRequest if the engine
        has no masks, without which the trainer could not compute the same distribution. Greedy
        sampling needs none."""
        if sampling.temperature > 0 and not gives_masks(self._spec, self._settings):
            raise BadRequest(NO_MASKS)
        return sampling.model_copy(update={"top_k": min(sampling.top_k or MAX_KEPT, MAX_KEPT)})

    def _text_of(self, prompt_token_ids: list[int], completion: CompletionOutput) -> str:
        stopped = completion.finish_reason == "stop"
        tokenizer = self._llm.get_tokenizer()
        return text_of(tokenizer, prompt_token_ids, completion.token_ids, stopped=stopped)

    async def _end_after(self, name: int, deadline_s: float) -> None:
        """Ends a request, which then returns the tokens so far."""
        await asyncio.sleep(deadline_s)
        self._ended.add(name)
        await self._llm.abort(str(name))

    async def logprobs(self, token_ids: list[int], adapter: Adapter | None = None) -> list[float]:
        return own_logprobs(await self._prompt_logprobs(token_ids, adapter, 0, AHEAD))

    async def top_logprobs(
        self, token_ids: list[int], adapter: Adapter | None, num_top: int
    ) -> tuple[list[float], TokenIds, Logprobs]:
        logprobs = await self._prompt_logprobs(token_ids, adapter, num_top, 0)
        return own_logprobs(logprobs), *top(logprobs, num_top)

    async def _prompt_logprobs(
        self, token_ids: list[int], adapter: Adapter | None, num_top: int, priority: int
    ) -> FlatLogprobs:
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=num_top,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        id = next(self._request_ids)
        output = await self._last_output(
            token_ids, params, "", id, priority=priority, adapter=adapter
        )
        assert isinstance(output.prompt_logprobs, FlatLogprobs)
        return output.prompt_logprobs

    async def pause(self, mode: PauseMode = "keep") -> None:
        # AsyncLLM.pause_generation does the same and then sleeps 20 ms, without need.
        core = self._llm.engine_core
        clears = mode != "keep" or not self.keeps_cache
        await self._answer(core.pause_scheduler_async(mode=mode, clear_cache=clears))

    async def resume(self) -> None:
        await self._answer(self._llm.resume_generation())

    async def load_files(self, folder: Path) -> None:
        """Loads in place. Raises Failed if the prefix cache of the old weights could not be
        reset."""
        await self._answer(self._llm.collective_rpc("load_published", args=(str(folder),)))
        await self._forget_prefixes()

    async def _forget_prefixes(self) -> None:
        if not self.keeps_cache and not await self.reset_cache():
            raise Failed("vLLM did not reset its prefix cache")

    async def reset_cache(self) -> bool:
        return bool(await self._answer(self._llm.reset_prefix_cache()))

    async def sleep(self) -> None:
        """Puts vLLM to sleep. A CPU has no sleep mode."""
        if current_platform.is_cpu():
            return await self.pause("abort")
        if not can_sleep(self._settings):
            raise BadRequest(
                "the sampler cannot free its memory; expected HONE_SLEEP_MODE=1 or HONE_COLOCATE=1"
            )
        await self._answer(self._llm.sleep(level=2))

    async def wake_weights(self) -> None:
        if not current_platform.is_cpu():
            await self._answer(self._llm.wake_up(tags=["weights"]))

    async def wake_cache(self) -> None:
        if not current_platform.is_cpu():
            await self._answer(self._llm.wake_up(tags=["kv_cache"]))

    async def meet(self, ref: BroadcastWeights | SharedWeights) -> None:
        """Makes each of vLLM's processes meet the trainer, in a thread."""
        host = urlsplit(self._settings.trainer_url).hostname or ""
        spec = transfer_spec(ref, host, self._settings.tensor_parallel_size)
        if wrong := sorted(spec.dtypes - {self.dtype}):
            raise Failed(
                f"the trainer sends {wrong[0]}, and the engine is {self.dtype}", code="not_met"
            )
        begin = (spec.backend, spec.meeting, spec.updates)
        await self._answer(self._llm.collective_rpc("meet_trainer", args=begin))
        meeting_s = MEETING_DEADLINES * ref.deadline_s
        end = time.monotonic() + meeting_s
        while time.monotonic() < end:
            problems = await self._answer(self._llm.collective_rpc("trainer_met"))
            if problem := next(filter(None, problems), None):
                break
            if None not in problems:
                return
            await asyncio.sleep(MEET_CHECK_S)
        else:
            problem = f"its turn did not come within {meeting_s:g} s"
        raise Failed(f"the trainer did not send version {ref.version}: {problem}", code="not_met")

    async def receive(self, ref: BroadcastWeights | SharedWeights) -> None:
        """Loads in place, in all of vLLM's processes. An engine that hangs is killed."""
        call = self._llm.collective_rpc("receive_published")
        loading_s = LOADING_DEADLINES * ref.deadline_s
        try:
            problems = await asyncio.wait_for(self._answer(call), loading_s)
        except TimeoutError as error:
            await self.stop()
            raise StateLost(
                f"the engine was ended, because it hung for {loading_s:g} s while it received "
                "weights; PUT /model starts a new one"
            ) from error
        if problem := next(filter(None, problems), None):
            raise Failed(problem, code="not_loaded")
        await self._forget_prefixes()

    async def restart(self, folder: Path) -> None:
        await self.stop()
        self._llm = await run_in_thread(
            lambda: start(engine_args(self._spec, self._settings, folder))
        )
        self.openai, self.chat = self._entrypoints()
        freeze_heap()

    async def load_adapter(self, adapter: Adapter) -> None:
        try:
            await self._answer(self._llm.add_lora(lora_request(adapter)))
        except HoneError:
            raise
        except Exception as error:  # vLLM raises errors of its process as plain Exceptions
            raise Conflict(
                f"vLLM refuses adapter {adapter.name!r}: {' '.join(str(error).split())}",
                code="no_adapters",
            ) from error

    async def unload_adapter(self, adapter: Adapter) -> None:
        await self._answer(self._llm.remove_lora(adapter.number))

    async def adapter_digests(self, adapter: Adapter) -> dict[str, str]:
        if self._settings.tensor_parallel_size > 1:
            return {}  # each device has a part of it
        call = self._llm.collective_rpc(
            "adapter_digests", args=(adapter.number, str(adapter.folder))
        )
        return (await self._answer(call))[0]

    async def digests(self, until: Set[str] | None = None) -> dict[str, str]:
        digests: dict[str, str] = {}
        begin: int | None = 0
        # between two turns the engine samples
        while begin is not None and not (until and until & digests.keys()):
            call = self._llm.collective_rpc("loaded_digests", args=(begin,))
            read, begin = (await self._answer(call))[0]
            digests |= read
        return digests

    async def set_version(self, owner: str, version: int) -> None:
        await self._answer(self._llm.update_weight_version(label(owner, version)))

    async def failure(self) -> str | None:
        return self._why_it_died() if self._llm.errored else None

    def prompt_tokens(self) -> tuple[int, int]:
        return self._num_prompt_tokens, self._num_cached_tokens

    def num_running(self) -> int:
        return self._llm.get_num_unfinished_requests()

    def num_running_tokens(self) -> int:
        return sum(
            state.prompt_len + (state.detokenizer.num_output_tokens() if state.detokenizer else 0)
            for state in self._llm.output_processor.request_states.values()
        )

    async def stop(self) -> None:
        """Ends the engine, and before it its listener: else vLLM would log that the engine died."""
        if listener := self._llm.output_handler:
            listener.cancel()
        self._llm.output_processor.propagate_error(EngineDeadError())
        await run_in_thread(self.shut_down)

    def shut_down(self) -> None:
        """Ends the engine's processes, killing them if they take longer than `STOP_S` seconds."""
        self._llm.shutdown(timeout=STOP_S)
        stop_children()  # vLLM does not wait for processes that it kills
        gc.unfreeze()  # nanobind reports objects that are frozen when Python ends as leaks

    def _entrypoints(self) -> tuple[ASGIApp, VllmChat]:
        app = openai_app(self._llm, self._spec.model, self._adapters, self._settings.tool_parser)
        serving = app.state.openai_serving_chat
        return app, VllmChat(serving, self._tokenizer)

    async def _last_output(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        salt: str,
        name: int,
        priority: int = 0,
        adapter: Adapter | None = None,
    ) -> RequestOutput:
        """Returns the finished output. Raises StateLost if the engine process dies, and Unavailable
        if vLLM ended the request, and not its deadline."""
        prompt = TokensInput(type="token", prompt_token_ids=prompt_token_ids)
        if salt:
            prompt["cache_salt"] = salt
        last: RequestOutput | None = None
        try:
            outputs = self._llm.generate(
                prompt,
                params,
                str(name),
                priority=priority,
                lora_request=lora_request(adapter) if adapter else None,
            )
            async for output in outputs:
                last = output
        except EngineDeadError as error:
            raise StateLost(self._why_it_died()) from error
        except VLLMClientError as error:
            raise BadRequest(str(error)) from error
        assert last is not None, "vLLM ends a request with an output"
        is_aborted = any(one.finish_reason == "abort" for one in last.outputs)
        if is_aborted and name not in self._ended:
            # an engine process that gets SIGTERM answers all requests so, and then ends
            raise Unavailable("vLLM's engine process ended the request; send the request again")
        self._num_prompt_tokens += len(prompt_token_ids)
        self._num_cached_tokens += last.num_cached_tokens or 0
        return last

    async def _answer(self, call: Coroutine[Any, Any, R]) -> R:
        """Returns the answer of vLLM's process. Raises StateLost if the process dies: vLLM would
        wait for ever."""
        task = asyncio.create_task(call)
        try:
            while not (await asyncio.wait({task}, timeout=LIFE_CHECK_S))[0]:
                if self._llm.errored:
                    raise StateLost(self._why_it_died())
            return task.result()
        except EngineDeadError as error:
            raise StateLost(self._why_it_died()) from error
        finally:
            task.cancel()

    def _why_it_died(self) -> str:
        cause = root_cause(self._errors) or "it was killed"
        return f"the engine process died ({cause}); PUT /model starts a new one"
