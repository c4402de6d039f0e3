"""From a request's sampling to vLLM's parameters, and from vLLM's completion to a rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from services.rollout.engine import (
    Adapter,
    failed_rollout,
)
from services.rollout.on_vllm.masks import packed
from services.rollout.on_vllm.versions import spans
from shared.errors import Failed
from shared.wire import (
    Rollout,
    Sampling,
    Span,
)
from shared.wire.packed import Logprobs, TokenIds


def sampling_params(sampling: Sampling) -> SamplingParams:
    """Returns vLLM's parameters. `logprobs=0` is the sampled token's alone; flat ones are lists,
    not one object per token."""
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
        logprobs=0,
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
) -> Rollout:
    """Returns the completion as it was sampled, or one that says what went wrong with it: that it
    was ended after `ended_s` seconds, for one. An adapter is of one version from the first token to
    the last; of other weights vLLM noted it. Raises Failed unless there is one log-prob per token,
    and with `masked` one list of the tokens that it could have been."""
    token_ids, logprobs = completion.token_ids, _logprobs(completion)
    if len(logprobs) != len(token_ids):
        raise Failed(
            f"vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens, expected one each"
        )
    mask = completion.sampling_mask
    kept_ids, kept_counts = TokenIds(), TokenIds()
    if masked:
        kept_ids, kept_counts = packed(mask.token_ids if mask else [], len(token_ids))
    sampled_by = (
        (Span(version=adapter.version, start=0),)
        if adapter
        else spans(completion.weight_versions or (), owner)
    )
    reason = completion.finish_reason
    if reason == "abort" and ended_s is not None:
        reason = "timeout"
    if reason != "stop" and reason != "length" and reason != "timeout":
        return failed_rollout(f"vLLM ended it with {reason!r} after {len(token_ids)} tokens")
    if not math.isfinite(math.fsum(logprobs)):
        return failed_rollout(
            f"vLLM gave a log-prob that is not finite among those of {len(token_ids)} tokens"
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
    )


def _logprobs(completion: CompletionOutput) -> Sequence[float]:
    """Returns the sampled tokens' log-probs, as vLLM keeps them for us or its OpenAI routes."""
    assert completion.logprobs is not None
    if isinstance(completion.logprobs, FlatLogprobs):
        return completion.logprobs.logprobs
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [candidates[token].logprob for token, candidates in pairs]
