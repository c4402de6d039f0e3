"""With what the engine is started. vLLM is imported where it is used: every worker of pytest
imports the test modules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.errors import BadRequest
from shared.wire import EngineSpec
from tests.support.tiny_models import make_tiny_model


def platform(on_cpu: bool) -> Any:
    return SimpleNamespace(is_cpu=lambda: on_cpu)


def engine_args(dtype: str) -> Any:
    config = SimpleNamespace(architectures=["Qwen2ForCausalLM"])
    return SimpleNamespace(dtype=dtype, create_model_config=lambda: config)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("dtype", "on_cpu", "taken"),
    [
        ("bfloat16", False, True),
        ("float16", False, True),
        ("float32", False, False),  # vLLM asserts one of the others
        ("float32", True, True),
    ],
)
def test_a_gpu_serves_no_adapters_in_float32(
    dtype: str, on_cpu: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.rollout.on_vllm import arguments

    resolve = SimpleNamespace(resolve_model_cls=lambda *_: (object, "Qwen2ForCausalLM"))
    monkeypatch.setattr(arguments, "ModelRegistry", resolve)
    monkeypatch.setattr(arguments, "supports_lora", lambda _: True)
    monkeypatch.setattr(arguments, "current_platform", platform(on_cpu))
    assert arguments.takes_adapters(engine_args(dtype)) is taken


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


@pytest.mark.engine
def test_more_devices_than_there_are_is_one_sentence() -> None:
    from services.rollout.on_vllm.arguments import check_devices

    check_devices(2, 2)
    with pytest.raises(BadRequest, match=r"SIZE is 4, and the sampler sees 2 GPU\(s\)"):
        check_devices(4, 2)
