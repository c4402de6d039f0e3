"""The Hugging Face Hub: a model's configuration and tokenizer, to check them; and data sets, each
at one commit. A commit that this machine has read before comes from its cache, without a request to
the Hub. And the check of which model folders on the orchestrator's host a job may name."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from services.orchestrator.data.tables import BATCH_ROWS, ArrowTable, check_expansion
from shared.errors import BadRequest, Unavailable, first_line
from shared.http.gate import other_folders
from shared.settings import Settings
from shared.weights.model_folder import EXPECTED, HUB_ID, TOKENIZERS, may_be_on_hub, model_folder

FETCHED = ("config.json", *TOKENIZERS, "tokenizer_config.json", "chat_template.jinja")


def is_cached(model: str, revision: str | None) -> bool:
    """Whether the model can be checked without fetching anything."""
    try:
        if Path(model).exists() or not may_be_on_hub(model):
            return True
    except (OSError, ValueError):
        return True  # not a valid model name, so there is nothing to fetch
    folder = cached_model(model, revision)
    has_tokenizer = folder and any((folder / name).is_file() for name in TOKENIZERS)
    return bool(folder and has_tokenizer and (folder / "config.json").is_file())


def cached_model(model: str, revision: str | None) -> Path | None:
    """Returns the folder with the model's files in this machine's Hugging Face cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(model, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(folder)


def fetch_model(model: str, revision: str | None) -> str | None:
    """Downloads configuration and tokenizer of a model into this machine's Hugging Face cache.
    Returns why the Hub could not be reached; None if it was. Raises BadRequest for a model that the
    Hub does not have. Has no deadline: it hangs if the Hub hangs."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError

    try:
        snapshot_download(model, revision=revision, allow_patterns=[*FETCHED])
    except (HFValidationError, HfHubHTTPError) as error:
        status = 404 if isinstance(error, HFValidationError) else error.response.status_code
        if status in (401, 404) and not isinstance(error, GatedRepoError):
            raise BadRequest(
                f"'model': the Hub has no model {model!r} at revision {revision or 'main'!r} that "
                "may be read with this HF_TOKEN; expected the id of a model there, or a folder"
            ) from error
        return f"{hub_url()} answers {status} for it"
    except Exception as error:  # the Hub's library may raise any class
        return f"{hub_url()} cannot be reached ({first_line(error.__cause__ or error)})"
    return None


def hub_url() -> str:
    """Returns the Hub's URL for messages: without user and password."""
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return re.sub(r"//[^/]*@", "//", url)


@dataclass(frozen=True)
class PinnedDataset:
    """A data set at a commit, with its configuration; None: the default one."""

    path: str
    config: str | None
    commit: str

    def cached(self) -> Any | None:
        """Returns the builder of the cached data set, None if it is not cached."""
        from datasets.packaged_modules.cache.cache import Cache

        for config in (self.config,) if self.config else self._defaults():
            for folder in self._folders(config):
                *_, name, version, commit = folder.parts
                return Cache(
                    repo_id=self.path,
                    dataset_name=self.path.split("/")[-1],
                    config_name=name,
                    version=version,
                    hash=commit,
                )
        return None

    def _folders(self, config: str) -> list[Path]:
        """Returns the cache folders of `datasets`: `owner___name/config/version/commit`."""
        from datasets import config as places
        from datasets.naming import camelcase_to_snakecase

        *owner, name = self.path.split("/")
        root = Path(places.HF_DATASETS_CACHE, "___".join([*owner, camelcase_to_snakecase(name)]))
        infos = root.glob(f"{config}/*/{self.commit}/dataset_info.json")
        return sorted(file.parent for file in infos)

    def _defaults(self) -> Iterator[str]:
        """Yields possible names of the default configuration: "default", else the name in the data
        set's card, if the card is in the cache."""
        from datasets.utils.metadata import MetadataConfigs
        from huggingface_hub import DatasetCard, try_to_load_from_cache

        yield "default"
        card = try_to_load_from_cache(
            self.path, "README.md", revision=self.commit, repo_type="dataset"
        )
        if isinstance(card, str):
            described = cast(Any, DatasetCard.load(card).data)
            if name := MetadataConfigs.from_dataset_card_data(described).get_default_config_name():
                yield name


PARQUET = b"PAR1"
"""The first bytes of a Parquet file."""


def _paths(value: Any) -> Iterator[Path]:
    """Yields the paths in what a download returns: texts, in lists and tables."""
    if isinstance(value, str | Path):
        yield Path(value)
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_paths, cast(Any, value).values()))
    elif value is not None:
        yield from itertools.chain.from_iterable(map(_paths, value))


@dataclass(frozen=True)
class HubTable(ArrowTable):
    """A table of the Hub. `version` is the commit; None if HF_HUB_OFFLINE forbids asking for it."""

    def _load(self, *, streaming: bool) -> Any:
        if self.version is None:
            return super()._load(streaming=streaming)
        pinned = PinnedDataset(self.arguments["path"], self.arguments["name"], self.version)
        builder = pinned.cached() or self._asked(pinned)
        if streaming:
            if hasattr(builder.config, "batch_size"):  # else a batch of Parquet is a row group
                builder.config.batch_size = BATCH_ROWS
            return builder.as_streaming_dataset(split=self.arguments["split"])
        builder.download_and_prepare(dl_manager=self._checked_downloads(builder))
        return builder.as_dataset(split=self.arguments["split"])

    def _checked_downloads(self, builder: Any) -> Any:
        """Returns a download manager that checks Parquet files, as uploads are checked, before
        their rows are written."""
        from datasets import DownloadConfig, DownloadManager

        table, commit = self, self.version or ""

        class CheckedDownloads(DownloadManager):
            def download(self, url_or_urls: Any) -> Any:
                downloaded = super().download(url_or_urls)
                for path in _paths(downloaded):
                    if path.is_file() and path.open("rb").read(4) == PARQUET:
                        check_expansion(path, f"a file of {table.name}", commit)
                return downloaded

        return CheckedDownloads(
            dataset_name=builder.dataset_name,
            download_config=DownloadConfig(use_etag=False, token=builder.token),
            base_path=builder.base_path,
        )

    def _asked(self, pinned: PinnedDataset) -> Any:
        """Returns the builder from the Hub's files. If the Hub is unreachable, `datasets` would
        take another commit from its cache."""
        import datasets
        from datasets import config

        config.HF_UPDATE_DOWNLOAD_COUNTS = False
        arguments = {name: each for name, each in self.arguments.items() if name != "split"}
        builder = cast(Any, datasets.load_dataset_builder(**arguments))
        if builder.hash != pinned.commit:
            raise Unavailable(
                f"{self.name} cannot be fetched: {hub_url()} cannot be reached, and the Hugging "
                f"Face cache here does not have its commit {pinned.commit}"
            )
        return builder


# --- folders of models ----------------------------------------------------------------------------


def named_model_folder(model: str, settings: Settings) -> Path | None:
    """Returns the folder that a job's model names, None for a Hugging Face id. Raises BadRequest as
    `model_folder` does, and for a folder that jobs may not name, whether it exists or not."""
    if "\0" not in model and not HUB_ID.fullmatch(model):
        _check_model(model, Path(model).resolve(), settings)
    folder = model_folder(model)
    if folder is None and not may_be_on_hub(model):
        raise BadRequest(
            f"'model': there is no folder {model!r} here, and ids of the Hugging Face hub have an "
            f"owner; {EXPECTED}"
        )
    if folder:  # a folder in the working directory looks like a Hugging Face id
        _check_model(model, folder, settings)
    return folder


def _check_model(model: str, path: Path, settings: Settings) -> None:
    if allowed := other_folders(path, settings):
        raise BadRequest(
            f"'model': got {model!r:.80}, and jobs may name model folders below these only: "
            f"{allowed}; a Hugging Face id may always be named"
        )
