"""Loading a model's tokenizer."""

from __future__ import annotations

from typing import Any

from shared.errors import BadRequest
from shared.model.names import model_folder
from shared.wire import EngineSpec

EMPTY = "<|endoftext|>"
"""All that transformers' tokenizers by bytes know when they are empty."""

EXPECTED = "expected tokenizer.json, or what it is made from, beside config.json"


def load_tokenizer(spec: EngineSpec) -> Any:
    """Returns the model's tokenizer. Raises BadRequest for a folder that has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(spec.model, revision=spec.revision)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if model_folder(spec.model) is None:
            raise  # the hub may be away
        raise BadRequest(
            f"the tokenizer in {spec.model!r} cannot be loaded: {type(error).__name__}: {error}; "
            f"{EXPECTED}"
        ) from error
    # Without its files, transformers makes an empty tokenizer of the model's architecture, which
    # knows special tokens at most.
    special = set(tokenizer.added_tokens_encoder) | set(tokenizer.all_special_tokens)
    if set(tokenizer.get_vocab()) <= special | {EMPTY}:
        raise BadRequest(
            f"the model {spec.model!r} has no tokenizer: it knows no token but special ones; "
            f"{EXPECTED}"
        )
    return tokenizer
