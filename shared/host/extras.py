"""What to do about a missing optional package."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra of pyproject.toml, from the repository: Hone is on
    no package index."""
    return (
        f"`make setup` in Hone's repository installs it into .venv, `pip install '.[{extra}]'` "
        "there into another environment"
    )
