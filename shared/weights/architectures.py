"""The language model architectures that can be trained and sampled: the pinned Transformers has a
causal model of each, and the pinned vLLM runs it by its own code or Transformers'. They are listed
in `architectures.txt`, because neither package is installed where jobs are submitted. Also which of
them are mixtures of experts, and which dtype "auto" means.

Mixtures are trained whole, router included, by any number of ranks. Transformers keeps the experts
of a layer in two tensors, so both have a gradient in each micro-batch, whichever experts its tokens
go to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = frozenset(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split())

TRIED = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures whose update was compared with plain transformers
(tests/system/test_trainer_experts.py), and whose log-probs with vLLM's on a CPU."""

NUM = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
"""The key of the number of experts per token, in the configurations of different architectures."""

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Experts:
    """A layer has `num` experts of size `intermediate`; a token goes to `per_token` of them.
    `shared` is the size of the shared part, to which all tokens go."""

    num: int
    per_token: int
    intermediate: int
    shared: int = 0


def has_experts(config: Config) -> bool:
    return config.get("enable_moe_block") is not False and any(config.get(key) for key in NUM)


def experts_of(config: Config) -> Experts | None:
    """Returns the experts of a language model's configuration; None for a model without experts.
    Raises KeyError if the number of experts per token or their size is missing."""
    if not has_experts(config):
        return None
    num = next(config[key] for key in NUM if config.get(key))
    per_token = next((config[key] for key in PER_TOKEN if config.get(key)), None)
    if per_token is None:
        raise KeyError(PER_TOKEN[0])
    each = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = config.get("shared_expert_intermediate_size") or (
        each * int(config.get("n_shared_experts") or 0)
    )
    return Experts(int(num), int(per_token), each, int(shared))


def untested_warning(model: str, config: Config) -> str | None:
    """Returns a warning for a job whose mixture of experts was not tested; None otherwise."""
    inner: Config = config.get("text_config") or config
    names: Any = config.get("architectures") or [None]
    if not has_experts(inner) or names[0] in TRIED:
        return None
    return (
        f"the model {model!r} is a mixture of experts of the architecture {names[0]!r}, which was "
        f"not tested; tested were {' and '.join(TRIED)}"
    )


def cannot_reload_on_cpu(config: Config, weight_sync: str) -> str | None:
    """Returns why a sampler on a CPU cannot load new weights or an adapter; None: it can."""
    inner: Config = config.get("text_config") or config
    if weight_sync == "restart" or not has_experts(inner):
        return None
    return (
        "it is a mixture of experts, whose weights vLLM packs on a CPU when it starts and does not "
        f'exchange afterwards: weight_sync is "{weight_sync}", and only "restart" works there'
    )


BFLOAT16_CAPABILITY = (8, 0)
"""The first CUDA compute capability (Ampere) that multiplies bfloat16. Older GPUs, such as the T4
and the V100, emulate it: slower than float32, and no more exact than bfloat16."""


def choose_dtype(
    asked: str, *, capability: tuple[int, int] | None, cpu_multiplies_bfloat16: bool
) -> str:
    """Returns the dtype of weights and products, by its name in torch. "auto" is bfloat16 where the
    hardware multiplies it, else float32.

    `capability` is the CUDA compute capability of the GPU; None on a CPU, for which
    `cpu_multiplies_bfloat16` decides.
    """
    if asked != "auto":
        return asked
    multiplies = (
        cpu_multiplies_bfloat16 if capability is None else capability >= BFLOAT16_CAPABILITY
    )
    return "bfloat16" if multiplies else "float32"
