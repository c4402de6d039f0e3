"""The README shows what is there: the demo's job as it is, and commands that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from hone.cli import app
from shared.config import PREFIX, Settings
from shared.job_file import parse_job

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TRAINING = (ROOT / "docs/training.md").read_text()
LEAST = {
    "name": "a",
    "model": "m",
    "steps": 1,
    "data": {"train": "t.jsonl"},
    "rewards": [{"grader": "length"}],
}


def test_the_job_in_the_readme_is_the_demos() -> None:
    (shown,) = re.findall(r"```toml\n(# The job of.*?)```", README, re.DOTALL)
    assert shown == (ROOT / "deploy/jobs/demo.toml").read_text()


def test_every_command_and_target_in_the_readme_exists() -> None:
    commands = {command.name for command in app.registered_commands}
    assert set(re.findall(r"`hone (\w+)", README)) <= commands
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) - {"and"} <= targets


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/rewards.md"])
def test_every_setting_and_path_in_a_page_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    assert set(re.findall(r"HONE_[A-Z_]+", text)) <= settings
    for path in re.findall(r"\]\(([\w/.-]+)\)", text):
        assert (ROOT / page).parent.joinpath(path).exists(), path


@pytest.mark.parametrize("recipe", re.findall(r"```toml\n(.*?)```", TRAINING, re.DOTALL))
def test_a_recipe_is_part_of_a_job(recipe: str) -> None:
    sections = tomllib.loads(recipe)
    job = parse_job(LEAST | sections).model_dump()
    for section, keys in sections.items():
        assert {key: job[section][key] for key in keys} == keys
