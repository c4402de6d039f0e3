"""vLLM's route for token ids, `/inference/v1/generate`: the client renders prompts and parses
answers itself. A turn continues from the recorded turn whose tokens its prompt begins with."""

from __future__ import annotations

from typing import Any

from services.orchestrator.extensions.agents.chat import given_turn
from services.orchestrator.extensions.agents.dialect import (
    Body,
    Dialect,
    check_fields,
    event,
    listed,
    logprobs_of,
    table,
    usage_of,
)
from services.orchestrator.extensions.agents.sessions import Answer, Limits, Session
from services.orchestrator.extensions.environments.recording import Asked

KNOWN = {"token_ids", "sampling_params"}

OF_SAMPLING = {"max_tokens", "stop", "stop_token_ids", "detokenize", "include_stop_str_in_output"}


def read(body: Body, _: Session) -> tuple[Asked, Limits]:
    check_fields(body, KNOWN)
    params = table(body, "sampling_params")
    check_fields(params, OF_SAMPLING)
    return given_turn(listed(body, "token_ids"), "token_ids", params)


def answer_body(answer: Answer, asked: Body) -> dict[str, Any]:
    """Returns vLLM's answer. Its tokens have their log-probs, always."""
    content = [{**each, "top_logprobs": []} for each in logprobs_of(answer)]
    choice = {
        "index": 0,
        "token_ids": list(answer.rollout.token_ids),
        "finish_reason": answer.rollout.finish_reason,
        "logprobs": {"content": content},
    }
    return {
        "request_id": str(asked.get("request_id") or answer.id),
        "choices": [choice],
        "prompt_token_ids": list(answer.prompt_token_ids),
        "usage": usage_of(answer),
    }


def stream(answer: Answer, asked: Body) -> str:
    return event(answer_body(answer, asked)) + event("[DONE]")


TOKENS = Dialect("/inference/v1/generate", read, answer_body, stream)
