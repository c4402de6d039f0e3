"""How large a job's model is: from the headers of its files, or from its configuration alone.

If the files are here (a folder, or the Hugging Face cache), their headers give the parameters. Else
the configuration is read from the Hub. For the architectures in `COUNTED` it gives the shape of
every tensor. Memory counts all experts, time only a token's own experts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import httpx2

from shared.errors import HoneError
from shared.job import LoraSpec
from shared.weights.architectures import Experts, experts_of
from shared.weights.folders import stored_tensors
from shared.weights.model_folder import HUB_TIMEOUT_S, hub_is_offline, model_folder, plain_shapes

COUNTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` of the architectures whose tensors follow from the configuration."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

NO_LAYERS = ("embed", "lm_head", "wte")
"""Parts of the names of matrices that `lora.target_modules = "all-linear"` leaves out."""

ATTENTION = "attn"
"""Part of the names of the layers of a mixture of experts that may have adapters."""

LANGUAGE_MODEL = "language_model."
"""Part of the names of a multimodal model's matrices that text goes through."""

Shapes = Mapping[str, tuple[int, ...]]
Config = Mapping[str, Any]


class UnknownModelSize(Exception):
    """Why the needs of a job are not known here: a sentence."""


@dataclass(frozen=True)
class Model:
    """The sizes of a model. `num_layers`, `hidden` (H), `intermediate` (I), `heads` (A), `kv_heads`
    (K), `head_size` (D) and `vocabulary` (V) come from its configuration; `shapes` are its
    tensors'; `max_len` is the longest sequence that it was made for, in tokens. For a mixture of
    experts I is the size that one token goes through: its own experts and the shared ones."""

    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    max_len: int
    shapes: Shapes
    experts: Experts | None = None

    @cached_property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def num_active(self) -> int:
        """How many parameters a token goes through: three matrices of its own experts alone."""
        if (experts := self.experts) is None:
            return self.num_parameters
        others = (experts.num - experts.per_token) * experts.intermediate
        return self.num_parameters - self.num_layers * 3 * self.hidden * others

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest tensor in transformers' layout: the embedding, or the gate and up
        projections of all experts of a layer."""
        experts = self.experts
        fused = 2 * experts.num * experts.intermediate * self.hidden if experts else 0
        return max(self.vocabulary * self.hidden, fused)

    @property
    def is_tied(self) -> bool:
        """Whether the output head is the embedding."""
        return HEAD not in self.shapes

    @cached_property
    def has_head_norms(self) -> bool:
        """Whether queries and keys have norms of their own."""
        return any(name.endswith(".q_norm.weight") for name in self.shapes)

    def num_trainable(self, lora: LoraSpec | None) -> int:
        """Returns how many parameters are trained: with adapters, the rank times (inputs + outputs)
        of each layer with an adapter."""
        if lora is None:
            return self.num_parameters
        return lora.rank * sum(map(sum, self.adapted_shapes(lora)))

    def adapted_shapes(self, lora: LoraSpec) -> list[tuple[int, ...]]:
        """Returns the shapes, outputs by inputs, of the matrices that get an adapter."""
        targets = lora.target_modules
        part = LANGUAGE_MODEL if any(LANGUAGE_MODEL in name for name in self.shapes) else ""
        return [
            shape
            for name, shape in self.shapes.items()
            if len(shape) == 2
            and part in name
            and (targets != "all-linear" or self.experts is None or ATTENTION in name)
            and not any(part in name for part in NO_LAYERS)
            and (targets == "all-linear" or name.split(".")[-2:-1] in [[each] for each in targets])
        ]


def find_model(model: str, revision: str | None = None, *, online: bool = True) -> Model:
    """Returns the sizes of a job's `model`. Raises UnknownModelSize for a folder whose
    configuration lacks a size, and for a Hub model that is neither cached nor, if `online`,
    reachable; BadRequest for a name that is neither a folder nor a Hub id."""
    folder = model_folder(model) or cached_folder(model, revision)
    if folder is None:
        return of_config(config_on_hub(model, revision, online=online), model)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shapes = _stored_shapes(folder, config)
    except (OSError, ValueError, KeyError, HoneError) as error:
        raise UnknownModelSize(f"the model {model!r} cannot be read: {error}") from error
    return of_config(config, model, shapes)


def _stored_shapes(folder: Path, config: Config) -> Shapes:
    """Returns the shapes of the tensors that transformers loads from model.safetensors, or from the
    files in the index. An output head tied to the embedding is left out. Raises UnknownModelSize if
    a file of the index is missing."""
    files = weight_files(folder)
    if missing := [file.name for file in files if not file.is_file()]:
        raise UnknownModelSize(
            f"the model in {str(folder)!r} lacks {', '.join(missing)} of its index"
        )
    names = {file.name for file in files}
    tied = EMBEDDING if config.get("tie_word_embeddings") else None
    tensors = {name: t for name, t in stored_tensors(folder).items() if t.file.name in names}
    return {
        name: tensor.shape
        for name, tensor in tensors.items()
        if not (name == HEAD and tied in tensors)
    }


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that transformers loads a model from, whether they exist or not:
    model.safetensors, else the index's files, else all safetensors files."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(names.values()))]
    return sorted(folder.glob("*.safetensors"))


def of_config(config: Config, name: str, shapes: Shapes | None = None) -> Model:
    """Returns the sizes in a configuration. Raises UnknownModelSize if a size is missing, and,
    without `shapes`, for an architecture whose parameters the configuration does not determine."""
    inner = config.get("text_config")
    own = cast(dict[str, Any], inner) if isinstance(inner, dict) else {}
    whole: dict[str, Any] = {**config, **own}
    try:
        experts = experts_of(whole)
        hidden, heads = int(whole["hidden_size"]), int(whole["num_attention_heads"])
        sizes = {
            "num_layers": int(whole["num_hidden_layers"]),
            "hidden": hidden,
            "intermediate": experts.per_token * experts.intermediate + experts.shared
            if experts
            else int(whole["intermediate_size"]),
            "heads": heads,
            "kv_heads": int(whole.get("num_key_value_heads") or heads),
            "head_size": int(whole.get("head_dim") or hidden // heads),
            "vocabulary": int(whole["vocab_size"]),
            "max_len": int(whole["max_position_embeddings"]),
        }
        if shapes is None:
            shapes = _shapes(whole, name, sizes["head_size"], experts)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else f"a size that is none: {error}"
        raise UnknownModelSize(f"the config.json of the model {name!r} has {why}") from error
    return Model(**sizes, shapes=shapes, experts=experts)


def _shapes(config: Config, model: str, head_size: int, experts: Experts | None) -> Shapes:
    """Returns the tensors of a decoder, by their names in Hugging Face files. Raises
    UnknownModelSize for an architecture that is not `COUNTED`."""
    kind = config.get("model_type")
    if kind not in COUNTED:
        raise UnknownModelSize(
            f"the model {model!r} is of type {kind!r}, whose parameters are counted in its files "
            f"only, and they are not here; `hf download {model}` fetches them"
        )
    is_tied = bool(config.get("tie_word_embeddings", False))
    found = plain_shapes({**config, "tie_word_embeddings": is_tied})
    for layer in range(int(config["num_hidden_layers"])):
        attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
        if kind == "qwen2":
            for name in ("q", "k", "v"):
                outputs, _ = found[f"{attention}.{name}_proj.weight"]
                found[f"{attention}.{name}_proj.bias"] = (outputs,)
        if kind in ("qwen3", "qwen3_moe"):
            found |= {f"{attention}.{name}_norm.weight": (head_size,) for name in ("q", "k")}
        if experts:
            for name in ("gate", "up", "down"):
                del found[f"{mlp}.{name}_proj.weight"]
            inner, hidden = experts.intermediate, int(config["hidden_size"])
            found[f"{mlp}.gate.weight"] = (experts.num, hidden)
            found[f"{mlp}.experts.gate_up_proj"] = (experts.num, 2 * inner, hidden)
            found[f"{mlp}.experts.down_proj"] = (experts.num, hidden, inner)
    return found


def cached_folder(model: str, revision: str | None) -> Path | None:
    """Returns the folder of a Hub model in the Hugging Face cache; None unless configuration and
    weights are complete."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    root = cache / f"models--{model.replace('/', '--')}"
    ref = root / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else ref.name
    folder = root / "snapshots" / commit
    try:
        files = weight_files(folder)
    except (OSError, ValueError, KeyError):
        return None
    is_whole = bool(files) and all(file.is_file() for file in files)
    return folder if is_whole and (folder / "config.json").is_file() else None


def config_on_hub(model: str, revision: str | None, *, online: bool = True) -> Config:
    """Returns the configuration of a model on the Hugging Face Hub (HF_ENDPOINT, HF_TOKEN). Raises
    UnknownModelSize where it cannot be had."""
    here = f"the model {model!r} is neither a folder here nor in the Hugging Face cache"
    if not online or hub_is_offline():
        raise UnknownModelSize(f"{here}, and the Hub was not asked")
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    url = f"{hub}/{model}/resolve/{revision or 'main'}/config.json"
    token = os.environ.get("HF_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        response = httpx2.get(url, headers=headers, timeout=HUB_TIMEOUT_S, follow_redirects=True)
        found: Any = response.json() if response.status_code == 200 else None
        why = f"answers {response.status_code} for its config.json, with no JSON object"
    except (httpx2.HTTPError, ValueError) as error:
        found, why = None, f"gives no config.json of it ({type(error).__name__})"
    if not isinstance(found, dict):
        remedy = "a gated model needs HF_TOKEN, and a mirror is named by HF_ENDPOINT"
        raise UnknownModelSize(f"{here}, and {hub} {why}; {remedy}")
    return cast(Config, found)
