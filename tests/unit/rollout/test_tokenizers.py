"""A model's tokenizer: a missing or broken one is a sentence, and no empty prompts. vLLM is
imported where it is used: every worker of pytest imports the test modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import BadRequest
from shared.wire import EngineSpec
from tests.support.tiny_models import make_tiny_model


def test_a_folder_without_a_whole_tokenizer_is_refused(tmp_path: Path) -> None:
    from services.rollout.on_vllm.arguments import load_tokenizer

    model = EngineSpec(model=str(make_tiny_model(tmp_path)))
    assert load_tokenizer(model).vocab_size == 64
    (tmp_path / "tokenizer.json").write_text("{garbage")
    with pytest.raises(BadRequest, match=r"tokenizer in '.+' cannot be loaded: .+; expected token"):
        load_tokenizer(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
        with pytest.raises(BadRequest, match="has no tokenizer: it has only special tokens"):
            load_tokenizer(model)
