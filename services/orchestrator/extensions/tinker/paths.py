"""Names and addresses: paths of what models saved, and ids of futures."""

from __future__ import annotations

import re
from typing import Any

from shared.errors import BadRequest
from shared.wire import SavedKind

ROOT = "/api/v1"

KINDS: dict[str, tuple[SavedKind, str]] = {
    "weights": ("checkpoint", "training"),
    "sampler_weights": ("snapshot", "sampler"),
    "external_weights": ("export", "external"),
}
"""The kinds by their part of a path, and Tinker's names of their types."""

PARTS = {kind: part for part, (kind, _) in KINDS.items()}

PATH = re.compile(r"tinker://([\w:-]+)/([a-z_]+)/([\w.-]+)")

NAME = re.compile(r"[\w.-]{1,100}")
"""Name of a checkpoint, snapshot or export."""

SESSION = re.compile(r"[0-9]{1,12}|x[0-9a-f]{16}")
"""Name of a sampling session: the number of a snapshot without a name, or "x" and 16 digits of a
digest."""

SAMPLE = re.compile(rf"sample:((?:{SESSION.pattern})--?[0-9]{{1,20}})")
"""A future of samples, in its model: the session, and the order's number there."""

NUMBER = re.compile(r"[0-9]{1,9}")
"""A future of an operation, in its model: the operation's number. 0: the model itself."""


def path_to(model_id: str, kind: SavedKind, name: str) -> str:
    return f"tinker://{model_id}/{PARTS[kind]}/{name}"


def read_path(path: Any, kind: SavedKind) -> tuple[str, str]:
    """Returns the model's id and the name of a path `tinker://MODEL/PART/NAME`. Raises BadRequest
    for any other path."""
    found = PATH.fullmatch(str(path))
    if not found or found[2] != PARTS[kind]:
        raise BadRequest(f"the path is {path!r:.200}; expected tinker://MODEL/{PARTS[kind]}/NAME")
    return found[1], found[3]


def read_name(path: Any) -> str:
    """Returns the name under which something is to be saved. Raises BadRequest."""
    if not isinstance(path, str) or not NAME.fullmatch(path) or not path.strip("."):
        raise BadRequest(
            f"'path': got {path!r:.120}; expected a name of letters, digits, '.', '_' and '-', of "
            "at most 100 characters"
        )
    return path


def future_of(model_id: str, number: int) -> str:
    """Returns the id of an operation's future."""
    return f"{model_id}:{number}"


def future_of_samples(model_id: str, order: str) -> str:
    """Returns the id of the future of an order of samples."""
    return f"{model_id}:sample:{order}"
