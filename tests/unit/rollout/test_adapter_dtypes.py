"""For which dtypes the engine is started with adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def platform(on_cpu: bool) -> Any:
    return SimpleNamespace(is_cpu=lambda: on_cpu)


def engine_args(dtype: str) -> Any:
    config = SimpleNamespace(architectures=["Qwen2ForCausalLM"])
    return SimpleNamespace(dtype=dtype, create_model_config=lambda: config)


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
