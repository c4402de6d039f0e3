"""Where a version's files lie, if the sampler sees them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.errors import BadRequest, Failed
from shared.weights.checkpoints import FILES
from shared.wire import AdapterWeights, FolderWeights


def seen_folder(ref: AdapterWeights, roots: Sequence[Path]) -> Path | None:
    """Returns the adapter's folder, or None if it is not seen here and its files are to be fetched.
    Raises BadRequest for other files than an adapter's, and what `published_folder` raises."""
    if ref.files and {file.name for file in ref.files} != set(FILES):
        names = [file.name for file in ref.files]
        raise BadRequest(f"'files': got {names}, expected {list(FILES)}")
    try:
        return published_folder(ref, roots)
    except Failed:
        if not ref.files:
            raise
        return None


def published_folder(ref: FolderWeights | AdapterWeights, roots: Sequence[Path]) -> Path:
    """Returns the real path of `ref.path`. Raises Failed unless it lies below one of `roots`, links
    resolved, and is a folder."""
    found = Path(ref.path).resolve()
    allowed = [root.resolve() for root in roots]
    if not any(root in found.parents for root in allowed):
        raise Failed(
            f"'path': got {ref.path!r}; weights are loaded only from below "
            f"{' or '.join(map(str, allowed))}",
            code="not_seen",
        )
    if not found.is_dir():
        raise Failed(
            f"'path': got {ref.path!r}, which is not a folder here; does the sampler see the "
            "trainer's volume?",
            code="not_seen",
        )
    return found
