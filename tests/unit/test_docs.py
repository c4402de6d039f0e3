"""The README shows what is there: the demo's job as it is, and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

from hone.cli import app
from shared.config import PREFIX, Settings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_job_in_the_readme_is_the_demos() -> None:
    (shown,) = re.findall(r"```toml\n(# The job of.*?)```", README, re.DOTALL)
    assert shown == (ROOT / "deploy/jobs/demo.toml").read_text()


def test_every_command_and_target_in_the_readme_exists() -> None:
    commands = {command.name for command in app.registered_commands}
    assert set(re.findall(r"`hone (\w+)", README)) <= commands
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) - {"and"} <= targets


def test_every_setting_and_path_in_the_readme_exists() -> None:
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    assert set(re.findall(r"HONE_[A-Z_]+", README)) <= settings
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / path).exists(), path
