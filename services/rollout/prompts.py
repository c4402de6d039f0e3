"""From a request to the prompt's token ids, and what is answered where there are none."""

from __future__ import annotations

from services.rollout.engine import BadPrompt, Engine, Overlong, failed_rollout
from shared.errors import BadRequest
from shared.wire import GenerateRequest, RolloutGroup
from shared.wire.packed import TokenIds


def prompt_ids(request: GenerateRequest, engine: Engine) -> tuple[list[int], bool]:
    """Returns the prompt's token ids `[T]`, and whether its first ones were cut off. Raises
    BadPrompt if nothing can be sampled after it, and BadRequest if the request gives no prompt or
    two."""
    if (request.prompt is None) == (request.prompt_token_ids is None):
        raise BadRequest("give one of 'prompt' and 'prompt_token_ids', not both or neither")
    if request.prompt_token_ids is None:
        assert request.prompt is not None
        ids = engine.encode(request.prompt, request.template_args)
    else:
        ids = list(request.prompt_token_ids)
    room = engine.max_model_len - request.sampling.max_tokens
    is_cut = request.truncate_prompt and 0 < room < len(ids)
    ids = ids[-room:] if is_cut else ids
    _check(ids, request.sampling.max_tokens, engine)
    return ids, is_cut


def group_without_prompt(request: GenerateRequest, error: BadPrompt) -> RolloutGroup:
    """Returns the group of a prompt that cannot be sampled after: each rollout says why."""
    rollouts = (failed_rollout(error.detail),) * request.sampling.n
    overlong = isinstance(error, Overlong)
    return RolloutGroup(prompt_token_ids=TokenIds(), rollouts=rollouts, overlong=overlong)


def _check(ids: list[int], max_tokens: int, engine: Engine) -> None:
    if not ids:
        raise BadPrompt("the prompt has no tokens")
    outside = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= outside < engine.vocab_size:
        raise BadPrompt(f"'prompt_token_ids': got {outside}, expected 0 to {engine.vocab_size - 1}")
    total = len(ids) + max_tokens
    if total > engine.max_model_len:
        raise Overlong(
            f"a prompt of {len(ids)} tokens with 'max_tokens' {max_tokens} makes {total}; the "
            f"model holds {engine.max_model_len}"
        )
