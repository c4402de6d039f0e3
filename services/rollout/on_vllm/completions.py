"""A request as vLLM takes it, and vLLM's completion as a rollout.

**Masks.** Under top-p, top-k or min-p the trainer needs the tokens that each token was drawn from:
vLLM's sampling masks. On a GPU vLLM returns them if `return_sampling_mask` is set. On a CPU vLLM's
model runner cannot, and `inside/executors.py` adds them. A token that was drawn from the whole
vocabulary has an empty mask.

**Text.** vLLM would make the text of a completion while it samples, and the text of each token
that it returns a log-prob of. That takes a fifth of the front end's time, and nothing here reads
it. Only stop strings need the text so far. Without stop strings vLLM is asked for tokens alone,
and the text is made once the completion is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from services.rollout.engine import Adapter, failed_rollout
from services.rollout.fencing import spans
from shared.errors import Failed
from shared.wire import Logprobs, Rollout, Sampling, Span, TokenIds

NUMBER = "#"
"""Between an adapter's name and its number, in the name that vLLM knows it by."""

PARAMS = SamplingParams()


def lora_request(adapter: Adapter) -> LoRARequest:
    """Returns the adapter as vLLM takes it. vLLM keys cached prefixes by this name."""
    name = f"{adapter.name}{NUMBER}{adapter.number}"
    return LoRARequest(name, adapter.number, str(adapter.folder))


def sampling_params(sampling: Sampling, num_top: int = 0) -> SamplingParams:
    """Returns vLLM's parameters, with the log-prob of each sampled token and of the `num_top`
    likeliest. Flat log-probs are lists, and not one object per token."""
    return SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        logprobs=num_top,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def rollout(
    completion: CompletionOutput,
    owner: str,
    adapter: Adapter | None = None,
    ended_s: float | None = None,
    *,
    masked: bool = False,
    num_top: int = 0,
) -> Rollout:
    """Returns the completion as it was sampled, or a rollout that says what went wrong, for example
    that it was ended after `ended_s` seconds. An adapter has one version for all tokens; for other
    weights vLLM's labels say the versions. Raises Failed unless there is one log-prob per token,
    and with `masked` one mask per token."""
    token_ids, logprobs = completion.token_ids, _logprobs(completion)
    if len(logprobs) != len(token_ids):
        raise Failed(
            f"vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens, expected one each"
        )
    mask = completion.sampling_mask
    kept_ids, kept_counts = TokenIds(), TokenIds()
    top_ids, top_logprobs = top(completion.logprobs, num_top)
    if masked:
        kept_ids, kept_counts = packed(mask.token_ids if mask else [], len(token_ids))
    labels = [(label.version, label.start) for label in completion.weight_versions or ()]
    one = (Span(version=adapter.version, start=0),) if adapter else ()
    sampled_by = one or spans(labels, owner)
    reason = completion.finish_reason
    if reason == "abort" and ended_s is not None:
        reason = "timeout"
    if reason != "stop" and reason != "length" and reason != "timeout":
        return failed_rollout(f"vLLM ended it with {reason!r} after {len(token_ids)} tokens")
    if not math.isfinite(math.fsum(logprobs)):
        return failed_rollout(
            f"vLLM gave a log-prob that is not finite among {len(token_ids)} tokens"
        )
    return Rollout(
        text=completion.text,
        token_ids=TokenIds(token_ids),
        logprobs=Logprobs(logprobs),
        finish_reason=reason,
        error=f"not done after {ended_s:g} s" if reason == "timeout" else None,
        spans=sampled_by,
        kept_ids=kept_ids,
        kept_counts=kept_counts,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _logprobs(completion: CompletionOutput) -> Sequence[float]:
    """Returns the sampled tokens' log-probs: flat for `sample`, objects for vLLM's OpenAI
    routes."""
    assert completion.logprobs is not None
    if isinstance(completion.logprobs, FlatLogprobs):
        return own_logprobs(completion.logprobs)
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [candidates[token].logprob for token, candidates in pairs]


def own_logprobs(found: FlatLogprobs) -> list[float]:
    """Returns the log-probs of the tokens themselves. vLLM has each one before the likeliest of its
    place."""
    if found.end_indices[:1] == [1] and len(found.logprobs) == len(found.start_indices):
        return found.logprobs
    return [found.logprobs[at] for at in _places(found)]


def top(found: Any, num_top: int) -> tuple[TokenIds, Logprobs]:
    """Returns the `num_top` likeliest tokens of each place, and their log-probs; nothing for 0."""
    if not num_top or not isinstance(found, FlatLogprobs):
        return TokenIds(), Logprobs()
    places = [at for start in _places(found) for at in range(start + 1, start + 1 + num_top)]
    return (
        TokenIds([found.token_ids[at] for at in places]),
        Logprobs([found.logprobs[at] for at in places]),
    )


def _places(found: FlatLogprobs) -> list[int]:
    """Returns where each place begins. The first token of a prompt has none."""
    pairs = zip(found.start_indices, found.end_indices, strict=True)
    return [start for start, end in pairs if end > start]


def packed(kept_T: Sequence[Sequence[int]], num_tokens: int) -> tuple[TokenIds, TokenIds]:
    """Returns `kept_ids` and `kept_counts` of a rollout (shared/wire/rollouts.py). Raises
    Failed unless there is one mask per token."""
    if len(kept_T) != num_tokens:
        raise Failed(
            f"vLLM gave {len(kept_T)} sampling masks for {num_tokens} tokens, expected one each"
        )
    ids = TokenIds([token for kept in kept_T for token in kept])
    return ids, TokenIds([len(kept) for kept in kept_T])


def text_of(
    tokenizer: Any,
    prompt_token_ids: list[int],
    token_ids: Sequence[int],
    *,
    stopped: bool,
    params: SamplingParams = PARAMS,
) -> str:
    """Returns the text of these tokens after the prompt, by vLLM's own detokenizer and so as vLLM
    would make it with `params`: without special tokens, without bytes at the end that make no
    character yet, and, if `stopped`, without the last token, which stopped the completion."""
    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=prompt_token_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, request)
    detokenizer.update(list(token_ids), stopped)
    return detokenizer.output_text
