"""Data sets of the Hugging Face Hub, each at one commit. A commit that this machine has read before
comes from its cache, without asking the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from services.orchestrator.data.hub import hub_url
from services.orchestrator.data.tables import ArrowTable
from shared.errors import Unavailable


@dataclass(frozen=True)
class Pinned:
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
        found = root.glob(f"{config}/*/{self.commit}/dataset_info.json")
        return sorted(file.parent for file in found)

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


@dataclass(frozen=True)
class HubTable(ArrowTable):
    """`version` is the commit; None if it is unknown because the Hub must not be asked."""

    @property
    def _pinned(self) -> Pinned | None:
        commit, given = self.version, self.arguments
        return Pinned(given["path"], given["name"], commit) if commit else None

    def is_cached(self) -> bool:
        """Whether it can be read without the Hub."""
        return self._pinned is not None and self._pinned.cached() is not None

    def _load(self, *, streaming: bool) -> Any:
        if (pinned := self._pinned) is None:
            return super()._load(streaming=streaming)
        builder = pinned.cached() or self._asked(pinned)
        if streaming:
            return builder.as_streaming_dataset(split=self.arguments["split"])
        builder.download_and_prepare()
        return builder.as_dataset(split=self.arguments["split"])

    def _asked(self, pinned: Pinned) -> Any:
        """Returns the builder from the Hub's files. If the Hub is away, `datasets` would take
        another commit from its cache."""
        import datasets
        from datasets import config

        config.HF_UPDATE_DOWNLOAD_COUNTS = False
        given = {name: each for name, each in self.arguments.items() if name != "split"}
        builder = cast(Any, datasets.load_dataset_builder(**given))
        if builder.hash != pinned.commit:
            raise Unavailable(
                f"{self.name} cannot be fetched: {hub_url()} cannot be reached, and the Hugging "
                f"Face cache here does not have its commit {pinned.commit}"
            )
        return builder
