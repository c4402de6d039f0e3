"""What to do where packages are missing that only some parts of Hone need."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Returns how the packages of an extra of pyproject.toml are installed: from the repository,
    for no package index has Hone."""
    return (
        f"`make setup` in Hone's repository installs it into .venv, `pip install '.[{extra}]'` "
        "there into another environment"
    )
