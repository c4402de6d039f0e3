"""The text of a completion, made once it is done.

vLLM makes it while it samples, and beside it the text of each token that it gives a log-prob of:
a fifth of the front end's time, for what nobody here reads. Only stop strings need the text of
what is sampled so far; without them vLLM is asked for tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

PARAMS = SamplingParams()


def text_of(
    tokenizer: Any, prompt_token_ids: list[int], token_ids: Sequence[int], *, stopped: bool
) -> str:
    """Returns what vLLM would: the text of these tokens after the prompt's, by its own detokenizer,
    without special tokens, without bytes that make no character yet at the end, and, if `stopped`,
    without the last token, which stopped it."""
    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=prompt_token_ids,
        mm_features=None,
        sampling_params=PARAMS,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, request)
    detokenizer.update(list(token_ids), stopped)
    return detokenizer.output_text
