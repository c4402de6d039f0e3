"""The jobs of Tinker's models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.orchestrator.extensions.tinker.requests import field
from shared.errors import BadRequest
from shared.job import ENDLESS, Job, name_of

ALPHA = 32.0
"""LoRA's alpha, whatever the rank: Tinker's."""


def job_document(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the job of a new model. Raises BadRequest for what is not supported."""
    lora = field(body, "lora_config", dict)
    optimizer = (field(body, "optimizer_config", dict) or {}).get("type", "adamw")
    if optimizer != "adamw":
        raise BadRequest(f"optimizer_config.type is {optimizer!r:.80}; expected 'adamw'")
    base = field(body, "base_model", str)
    if not base:
        raise BadRequest(f"'base_model': got {base!r}; expected a model's folder or id")
    document: dict[str, Any] = {
        "name": name_of(base.rstrip("/").rpartition("/")[2], "program"),
        "model": base,
        "steps": ENDLESS,
        "rewards": [],
        "training": {"objective": "program"},
    }
    if lora is not None:
        rank = field(lora, "rank", int, "lora_config.rank")
        if rank is None:
            raise BadRequest(
                "lora_config.rank is missing; expected a whole number, or no lora_config, which "
                "trains all weights"
            )
        document["lora"] = {"rank": rank, "alpha": ALPHA}
        document["seed"] = field(lora, "seed", int, "lora_config.seed") or 0
    return document


def loaded_document(body: Mapping[str, Any], source: Job, checkpoint: str) -> dict[str, Any]:
    """Returns the job of a new model that begins with a checkpoint of `source`. Raises BadRequest
    for what is not supported."""
    base = field(body, "base_model", str)
    if base is not None and base != source.model:
        raise BadRequest(
            f"'base_model': got {base!r:.200}, expected {source.model!r}, the checkpoint's"
        )
    document = source.model_dump(mode="json", exclude_unset=True, exclude={"metadata"})
    training = {
        "start_from": checkpoint,
        "start_optimizer": field(body, "optimizer", bool) or False,
    }
    return document | {"training": document.get("training", {}) | training}


def sampler_document(body: Mapping[str, Any], source: Job | None = None) -> dict[str, Any]:
    """Returns the job of a model that only samples: the base model, or snapshots of `source`."""
    if source is None:
        return job_document({**body, "lora_config": {"rank": SAMPLER_RANK}})
    document = source.model_dump(mode="json", exclude_unset=True, exclude={"metadata"})
    return document | {"training": {"objective": "program"}}


SAMPLER_RANK = 32
"""The rank of the adapter, which stays unused, of a model that samples the base model."""

MODEL = "tinker_model"
"""The name, in a job's metadata, of the id that the SDK generates for a model."""

TRAIN = ":train:"
"""What stands in that id between the session and the model's number there."""


MAX_SESSION_CHARS = 200
"""Most characters of the id of a session of the SDK."""


def creation_key(body: Mapping[str, Any], number: str) -> str:
    """Returns the SDK's session and a number in it, as one text: what it creates under the same
    text is the same. Raises BadRequest if one is missing."""
    session, place = field(body, "session_id", str), field(body, number, int)
    if not session or len(session) > MAX_SESSION_CHARS or place is None:
        raise BadRequest(
            f"'session_id' is {session!r:.80} and {number!r} {place!r}; expected both: the same "
            "two name the same model or session (session_id has at most "
            f"{MAX_SESSION_CHARS} characters)"
        )
    return f"{session}:{place}"


def model_id_of(body: Mapping[str, Any]) -> str:
    """Returns the id that the SDK gives the model that it creates."""
    session, _, number = creation_key(body, "model_seq_id").rpartition(":")
    return f"{session}{TRAIN}{number}"


def program_of(metadata: Mapping[str, str]) -> str:
    """Returns the SDK's session that made the model with this metadata; "" without one."""
    return metadata.get(MODEL, "").rpartition(TRAIN)[0]


def adapter_of(job: Job) -> dict[str, Any]:
    """Returns what Tinker tells of a model's adapter."""
    return {"is_lora": job.lora is not None, "lora_rank": job.lora.rank if job.lora else None}


def metadata(body: Mapping[str, Any]) -> dict[str, str]:
    """Returns the metadata of a model's job: the program's own, and the SDK's id."""
    given = field(body, "user_metadata", dict) or {}
    own = {str(name)[:64]: str(value)[:512] for name, value in [*given.items()][:15]}
    return own | {MODEL: model_id_of(body)}
