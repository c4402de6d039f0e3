"""`/v1/files`, in OpenAI's shape."""

from __future__ import annotations

from typing import Literal

from shared.wire.base import Wire

Purpose = Literal["fine-tune", "assistants", "batch", "vision", "user_data", "evals"]
"""A file's purpose, as OpenAI's clients send it. A job may use any file."""


class UploadedFile(Wire):
    """A file that was uploaded. `created_at` is Unix seconds. A job names it by its `id`, as
    `data.train` or `data.eval`."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FileList(Wire):
    """A page of files. `has_more`: the next page begins after `last_id` (`?after=`)."""

    object: Literal["list"] = "list"
    data: tuple[UploadedFile, ...]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class FileDeleted(Wire):
    """`DELETE /v1/files/{id}`."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
