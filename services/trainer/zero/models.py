"""Finds and loads a job's model: a folder, or a Hugging Face id. Fails fast with a clear message if
it is neither.

Only rank 0 reads the weights. The other ranks make the model's shape and get the values from rank
0, so that a host with several ranks holds one copy in memory, and not one per rank.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils.hub import cached_file, cached_files

from services.trainer.zero.host_memory import as_bytes
from shared.errors import BadRequest, Conflict, HoneError, first_line, from_problem
from shared.job import Job
from shared.weights import architectures
from shared.weights.model_folder import EXPECTED, check_hub, check_rope, model_folder, read_config

SAVED_AS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""File names of a model's weights, in the order in which transformers looks for them. An index
names files that hold a part each."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "chat_template.jinja",
        "chat_template.json",
    ),
)


def check_model(job: Job) -> None:
    """Raises BadRequest if `job.model` is neither a model folder here nor a model on the Hugging
    Face hub, or has a RoPE that is not fixed for all sequences of the job."""
    folder = model_folder(job.model) or _configuration(job).parent
    check_rope(job.model, read_config(folder), job.max_model_len)


def _configuration(job: Job) -> Path:
    """Returns the configuration of a model on the hub, fetched if it is not in the cache.

    transformers would retry an unreachable hub for half a minute, on every rank; this sends one
    request.
    """
    with contextlib.suppress(OSError, ValueError):  # not in the cache: requested from the hub below
        return _cached_configuration(job, local_files_only=True)
    check_hub(job.model)
    try:
        return _cached_configuration(job)
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"the hub has no model {job.model!r} for this token: {str(error).splitlines()[0]}; "
            f"{EXPECTED}"
        ) from error


def _cached_configuration(job: Job, **options: bool) -> Path:
    path = cached_file(job.model, "config.json", revision=job.model_revision, **options)
    return Path(cast(str, path))


def model_files(job: Job) -> list[Path]:
    """Returns the files of the model's configuration and weights, sorted by name. Fetches files
    from the hub that are not in its cache. Raises BadRequest if there are no weights."""
    for saved_as in SAVED_AS:
        files = _cached(job, ["config.json", saved_as])
        if len(files) < 2:
            continue
        if not saved_as.endswith(".index.json"):
            return files
        index = json.loads(files[1].read_text(encoding="utf-8"))
        return files[:1] + _cached(job, sorted(set(index["weight_map"].values())))
    raise BadRequest(f"the model {job.model!r} has no weights; {EXPECTED}")


def _cached(job: Job, names: list[str]) -> list[Path]:
    """Returns the model's existing files with these names: in its folder, or in the cache."""
    files = cached_files(
        job.model, names, revision=job.model_revision, _raise_exceptions_for_missing_entries=False
    )
    return [Path(file) for file in files or ()]


def load_on_all_ranks(
    job: Job, dtype: torch.dtype, device: torch.device, *, spread: bool = False
) -> Any:
    """Returns the model with the same weights on every rank, read by rank 0 alone: a collective.

    `spread`: parameters stay in host memory, with values on rank 0 only, for DeepSpeed to partition
    (ZeRO-3). Buffers are on the device either way. Raises rank 0's error on every rank.
    """
    place = torch.device("cpu") if spread else device
    model = _read_by_rank_0(job, dtype, place)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    shared = list(model.buffers()) if spread else [*model.parameters(), *model.buffers()]
    if dist.get_world_size() > 1:
        for tensor in shared:
            dist.broadcast(as_bytes(tensor), src=0)  # not every backend takes every dtype
    return model


def _read_by_rank_0(job: Job, dtype: torch.dtype, place: torch.device) -> Any:
    model, problem = None, None
    try:
        if dist.get_rank() == 0:
            model = load_model(job, dtype, place)
        else:
            model = load_model(job, dtype, torch.device("meta")).to_empty(device=place)
            model.tie_weights()  # loading on the meta device lost their tie
    except HoneError as error:
        problem = error.problem()
    problems: list[Any] = [problem] * dist.get_world_size()
    if len(problems) > 1:
        dist.all_gather_object(problems, problem)
    for problem in problems:
        if problem is not None:
            raise from_problem(problem["status"], problem, "a rank")
    return model


def load_model(job: Job, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns the causal LM with dropout off, because the trained policy must equal the sampled
    one. On the meta device it has shapes only, and no values."""
    options: dict[str, Any] = {}
    if job.memory.attention != "auto":
        options["attn_implementation"] = job.memory.attention
    if device.type == "meta":
        options["device_map"] = device
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            job.model, revision=job.model_revision, dtype=dtype, **options
        )
    except ImportError as error:
        raise BadRequest(
            f"memory.attention is {job.memory.attention!r}, which is not installed: "
            f"{first_line(error)}"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise BadRequest(
            f"cannot load the model {job.model!r}: {first_line(error)}; {EXPECTED}"
        ) from error
    _cap_attention(model, job)
    return model.to(device).eval()


def _cap_attention(model: Any, job: Job) -> None:
    """Makes a model that caps its attention's logits (Gemma 2) apply the cap, as samplers do.
    torch's own attention, which transformers prefers, ignores the cap. Raises BadRequest if the job
    asks for that attention."""
    config = model.config.get_text_config()
    cap = getattr(config, "attn_logit_softcapping", None)
    if not cap or config._attn_implementation != "sdpa":
        return
    if job.memory.attention == "sdpa":
        raise BadRequest(
            f"memory.attention is 'sdpa', which leaves out the cap of {cap:g} that the model "
            f"{job.model!r} puts on its attention's logits; expected 'auto', 'eager' or "
            "'flash_attention_2'"
        )
    model.set_attn_implementation("eager")


def copy_tokenizer(job: Job, folder: Path) -> None:
    """Copies the model's tokenizer into `folder`, byte for byte; a model without one makes a
    checkpoint without one.

    It is not loaded and saved, because AutoTokenizer picks a class by the model's architecture,
    which may rewrite the file.
    """
    for file in _cached(job, list(TOKENIZER_FILES)):
        shutil.copyfile(file, folder / file.name)


def checkpoint_tensors(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the model's weights as `save_pretrained` would write them: under the checkpoint's
    names and in its shapes, tied ones once. Copies only what a checkpoint stores differently."""
    kept = _without_unsaved(model, weights)
    names, changed = _in_checkpoint(model, kept)
    if not changed:
        return {name: kept[name] for name in names}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(kept, model))


def model_tensors(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of `checkpoint_tensors`, but in the model's own memory. Raises Conflict
    if the checkpoint has other tensors than the model, as for a mixture of experts, which has all
    experts of a layer in one tensor."""
    names, changed = _in_checkpoint(model, _without_unsaved(model, weights))
    if changed:
        raise Conflict(
            f"{len(changed)} tensors have another form in training than in a checkpoint, the first "
            f"is {changed[0]!r}: they cannot be sent from device to device"
        )
    return {name: weights[name] for name in names}


def _without_unsaved(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    unsaved = model._keys_to_ignore_on_save or ()
    return {name: weight for name, weight in weights.items() if name not in unsaved}


def _in_checkpoint(model: Any, weights: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Returns the names of the checkpoint's tensors, and the names of tensors other than `weights`:
    merged from adapters, cut or transposed. Computed with tensors without memory, because
    transformers copies tensors that share a buffer, as DeepSpeed's do."""
    own = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    if others := sorted(weights.keys() - own.keys()):
        return [], others
    shapes = {name: torch.empty_like(weight, device="meta") for name, weight in weights.items()}
    saved = revert_weight_conversion(
        model, remove_tied_weights_from_state_dict(dict(shapes), model)
    )
    return [*saved], sorted(
        name for name, tensor in saved.items() if shapes.get(name) is not tensor
    )


def choose_dtype(setting: str) -> torch.dtype:
    """Returns the dtype of weights and products on this rank, by
    `shared/weights/architectures.py`."""
    chosen = architectures.choose_dtype(
        setting,
        capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
        cpu_multiplies_bfloat16=cpu_multiplies_bfloat16(),
    )
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[chosen]


def cpu_multiplies_bfloat16() -> bool:
    """Returns whether this processor has instructions for products of bfloat16."""
    found = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
    return bool(found)
