"""The `model` of a job or of an engine: a folder, or a model on the Hugging Face hub. Checks that a
model folder is complete before anything loads it: its files against each other, its tensors against
its configuration, its architecture, its tokenizer. Only headers are read, no tensor. Neither torch
nor the model's code is needed.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import httpx2

from shared.errors import BadRequest, Failed, Unavailable
from shared.explain import closest
from shared.weights.architectures import ARCHITECTURES
from shared.weights.folders import ITEM_BYTES, StoredTensor, stored_tensors

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files from which transformers makes a tokenizer. One of them must exist."""

PLAIN = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Architectures with the same names and shapes of tensors, which therefore follow from the
configuration."""

STRETCHED = ("rope_scaling", "rope_parameters")
"""Configuration keys that may extend a model's context beyond its stated length."""

CPU_HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""Attention head sizes that the pinned vLLM supports on a CPU."""

Config = Mapping[str, Any]
Tensors = Mapping[str, StoredTensor]


def check_model_folder(folder: Path, max_model_len: int | None = None) -> None:
    """Raises BadRequest that says which file of a model folder is wrong, and what is expected."""
    config = check_config(folder, max_model_len)
    tensors = _whole_tensors(folder)
    if config["architectures"][0] in PLAIN:
        _check_tensors(folder, config, tensors)
    _check_tokenizer(folder)


def check_config(folder: Path, max_model_len: int | None = None) -> Config:
    """Returns the model's configuration. Raises BadRequest for a model that cannot be trained, or
    whose context is shorter than `max_model_len`."""
    config = read_config(folder)
    _check_architecture(folder, config)
    window = window_of(config)
    if window is not None and max_model_len is not None and max_model_len > window:
        raise BadRequest(
            f"'max_model_len' is {max_model_len}, and the model {str(folder)!r} holds {window} "
            f"tokens (max_position_embeddings in its config.json); expected at most {window}"
        )
    if "quantization_config" in config:
        raise _wrong(
            folder / "config.json",
            "it has a quantization_config, and quantized weights cannot be trained; expected a "
            "model in float32, float16 or bfloat16",
        )
    return config


def read_config(folder: Path) -> Config:
    """Returns the model's configuration. Raises BadRequest if it is not a JSON object."""
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(path, f"it cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise _wrong(path, "it is not a JSON object")
    return cast(Config, config)


def limit_of(max_model_len: int | None, window: int | None) -> tuple[int, str] | None:
    """Returns the most tokens of prompt and completion together, and what sets this limit: the
    job's `max_model_len` or the model; None if neither is known."""
    if max_model_len is not None and (window is None or max_model_len < window):
        return max_model_len, "the job's max_model_len"
    return None if window is None else (window, "the model")


def window_of(config: Config) -> int | None:
    """Returns the context length in tokens that the configuration states; None if it states none,
    or may be extended."""
    inner: Config = config.get("text_config") or config
    for key in STRETCHED:
        found: Any = inner.get(key)
        if isinstance(found, dict) and "factor" in found:
            return None
    window: Any = inner.get("max_position_embeddings")
    return window if isinstance(window, int) else None


def cpu_limit(config: Config) -> str | None:
    """Returns why vLLM cannot sample the model on a CPU, as far as that is known; None: it can."""
    inner: Config = config.get("text_config") or config
    head, hidden = inner.get("head_dim"), inner.get("hidden_size")
    heads = inner.get("num_attention_heads")
    if not head and isinstance(hidden, int) and isinstance(heads, int) and heads:
        head = hidden // heads
    if not isinstance(head, int) or "kv_lora_rank" in inner or head in CPU_HEAD_SIZES:
        return None
    sizes = ", ".join(map(str, sorted(CPU_HEAD_SIZES)))
    return (
        f"its attention heads have {head} dimensions (head_dim in its config.json, else "
        f"hidden_size by num_attention_heads), and vLLM has them on a CPU of {sizes} only"
    )


def check_rope(model: str, config: Config, max_model_len: int | None) -> None:
    """Raises BadRequest if sequences may be longer than the length for which the model's RoPE is
    fixed.

    Beyond it Transformers chooses the frequencies of all rows of a micro-batch by the longest row
    (its `dynamic_rope_update`), so a completion's log-probs would depend on the other rows. vLLM
    chooses longrope's frequencies (arXiv 2402.13753) once, by `max_model_len`.
    """
    inner: Config = config.get("text_config") or config
    for rope in _ropes(inner):
        held: Any = inner.get("max_position_embeddings")
        match kind := rope.get("rope_type", rope.get("type")):
            case "longrope" | "su":
                key = "original_max_position_embeddings"
                original, most = inner.get(key) or rope.get(key) or held, held
            case "dynamic":
                key = "max_position_embeddings"
                original, most = held, (held or 0) * (rope.get("factor") or 1)
            case _:
                continue
        if original and (max_model_len or most) > original:
            got = f"'max_model_len' is {max_model_len}" if max_model_len else "no 'max_model_len'"
            raise BadRequest(
                f"{got}, and the model {model!r} has RoPE of type {kind!r}, which is the same for "
                f"sequences of any length up to {original} tokens only ({key} in its config.json); "
                f"expected max_model_len = {original} or less"
            )


def _ropes(config: Config) -> Iterator[Config]:
    """Yields the model's RoPE parameters: one set for all layers, or one for each type of layer."""
    for key in STRETCHED:
        found: Any = config.get(key)
        if isinstance(found, dict):
            rope = cast(Config, found)
            yield rope
            yield from (each for each in rope.values() if isinstance(each, dict))


def _check_architecture(folder: Path, config: Config) -> None:
    found: Any = config.get("architectures")
    if not isinstance(found, list) or not found:
        raise _wrong(
            folder / "config.json", 'it names no architecture; expected "architectures": ["..."]'
        )
    name = str(cast(list[Any], found)[0])
    if name not in ARCHITECTURES:
        near = closest(name, sorted(ARCHITECTURES))
        meant = f"; did you mean {near!r}?" if near else ""
        raise _wrong(
            folder / "config.json",
            f"the architecture {name!r} is not a language model that Hone's versions of vLLM and "
            f"Transformers both support{meant}",
        )


def _whole_tensors(folder: Path) -> Tensors:
    """Returns the tensors. Raises BadRequest for a damaged file, and for a file that contradicts
    the index."""
    try:
        tensors = stored_tensors(folder)
    except Failed as error:
        raise BadRequest(f"'model': {error.detail}") from error
    ends: dict[Path, int] = {}
    for name, tensor in tensors.items():
        ends[tensor.file] = max(ends.get(tensor.file, 0), tensor.end)
        size_bytes = ITEM_BYTES.get(tensor.dtype)
        expected = (size_bytes or 0) * math.prod(tensor.shape)
        if size_bytes and expected != tensor.size_bytes:
            raise _wrong(
                tensor.file,
                f"tensor {name!r} has {tensor.size_bytes} bytes, and {tensor.dtype} of shape "
                f"{list(tensor.shape)} takes {expected}",
            )
    for file, end in ends.items():
        if (size := file.stat().st_size) != end:
            raise _wrong(file, f"it has {size} bytes, and its header describes {end}")
    _check_index(folder, tensors)
    return tensors


def _check_index(folder: Path, tensors: Tensors) -> None:
    path = folder / "model.safetensors.index.json"
    if not path.is_file() or (folder / "model.safetensors").is_file():
        return
    try:
        placed = cast(dict[str, str], json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise _wrong(path, f"it has no weight_map that can be read: {error}") from error
    for name, file in placed.items():
        if not (folder / file).is_file():
            raise _wrong(path, f"it names {file!r}, which is not in the folder")
        if name not in tensors or tensors[name].file.name != file:
            raise _wrong(path, f"it has tensor {name!r} in {file!r}, which does not have it")


def _check_tensors(folder: Path, config: Config, tensors: Tensors) -> None:
    """Raises BadRequest for a missing tensor, for a tensor that the configuration does not have,
    and for a wrong shape."""
    try:
        expected = plain_shapes(config)
    except (KeyError, TypeError) as error:
        raise _wrong(folder / "config.json", f"it has no {error}") from error
    for name, shape in expected.items():
        if name not in tensors:
            raise _wrong(folder / "config.json", f"it names a tensor {name!r}, which no file has")
        if tensors[name].shape != shape:
            raise _wrong(
                tensors[name].file,
                f"tensor {name!r} has the shape {list(tensors[name].shape)}, and by config.json "
                f"it has {list(shape)}",
            )
    layers = int(config["num_hidden_layers"])
    for name, tensor in tensors.items():
        found = re.match(r"model\.layers\.(\d+)\.", name)
        if found and int(found[1]) >= layers:
            raise _wrong(
                tensor.file,
                f"tensor {name!r} is of a layer that config.json does not have: its "
                f"num_hidden_layers is {layers}",
            )


def plain_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor, without biases, for a PLAIN architecture. Raises KeyError
    for a configuration without a size."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    vocab, heads = int(config["vocab_size"]), int(config["num_attention_heads"])
    head = int(config.get("head_dim") or hidden // heads)
    kv = head * int(config.get("num_key_value_heads") or heads)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if config.get("tie_word_embeddings") is False:
        # the tensors that are left out differ by architecture
        shapes["lm_head.weight"] = (vocab, hidden)
    for number in range(int(config["num_hidden_layers"])):
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}.weight"] = shape
    return shapes


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise BadRequest(
            f"'model': the folder {str(folder)!r} has no tokenizer; expected tokenizer.json, or a "
            f"file that it is made from ({', '.join(TOKENIZERS[1:])}), beside config.json"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        try:
            if path.is_file():
                json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _wrong(path, f"it cannot be read as JSON: {error}") from error


def _wrong(file: Path, why: str) -> BadRequest:
    return BadRequest(f"'model': {str(file)!r}: {why}")


HUB_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")
MODELS_WITHOUT_OWNER = frozenset(
    {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "ctrl", "openai-gpt"}
)
"""Hub models from before ids had an owner. Any other name without an owner, such as OpenAI's names,
is not a model there."""

EXPECTED = (
    "expected a folder with config.json and *.safetensors files, or a Hugging Face id such as "
    "Qwen/Qwen2.5-0.5B-Instruct"
)


def may_be_on_hub(model: str) -> bool:
    """Whether this may be the name of a model on the Hugging Face hub."""
    has_owner = "/" in model or model in MODELS_WITHOUT_OWNER
    return has_owner and HUB_ID.fullmatch(model) is not None


def hub_is_offline() -> bool:
    """Whether requests to the Hugging Face hub are forbidden (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


HUB_TIMEOUT_S = 10.0


def check_hub(model: str) -> None:
    """Raises Unavailable if the Hugging Face hub is unreachable; call it for a model that is not
    cached here. Does nothing if requests are forbidden (HF_HUB_OFFLINE)."""
    if hub_is_offline():
        return
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        httpx2.head(hub, timeout=HUB_TIMEOUT_S)
    except httpx2.HTTPError as error:
        raise Unavailable(
            f"{model!r} is neither a folder on this host nor in its Hugging Face cache, and {hub} "
            f"cannot be reached ({type(error).__name__}: {error}); {EXPECTED}",
            code="hub_away",
        ) from error


def model_folder(model: str) -> Path | None:
    """Returns the folder that `model` names, or None if it is a Hugging Face id. Sends no request
    to the hub.

    A folder must hold a configuration and complete safetensors files: later versions' weights are
    compared with these. Raises BadRequest if `model` is neither.
    """
    folder = Path(model)
    try:
        folder.exists()
    except OSError as error:  # too long, or in a folder that may not be read
        raise BadRequest(f"'model': {model!r:.80}: {error.strerror}; {EXPECTED}") from error
    if folder.is_dir():
        for pattern in ("config.json", "*.safetensors"):
            if not any(folder.glob(pattern)):
                raise BadRequest(f"'model': the folder {model!r} has no {pattern}; {EXPECTED}")
        try:
            stored_tensors(folder)
        except Failed as error:
            raise BadRequest(f"'model': {error.detail}") from error
        return folder.resolve()
    if folder.exists():
        raise BadRequest(f"'model': {model!r} is a file; {EXPECTED}")
    if not HUB_ID.fullmatch(model):
        raise BadRequest(
            f"'model': there is no folder {model!r} here; {EXPECTED}", code="not_there"
        )
    return None
