"""Every example in docs/rewards.md runs as it is written there, and its result is the one that the
page says."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hone.cli import app
from services.reward.app import create_service
from services.reward.grading import registry
from shared.job import RewardSpec
from shared.settings import PREFIX, Settings
from shared.wire import Execution
from tests.support.reward_helpers import ScriptedSandbox

pytestmark = pytest.mark.slow

DOCS = (Path(__file__).parents[3] / "docs/rewards.md").read_text()
COMMANDS = re.findall(r"^(hone grade .*?) +# (\S+)$", DOCS, re.MULTILINE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks("python"):
        (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("command", "value"), COMMANDS)
def test_a_command_gives_what_it_says(url: str, command: str, value: str) -> None:
    arguments = [*shlex.split(command)[1:], "-o", "json"]
    result = CliRunner().invoke(
        app, arguments, env={"HONE_REWARD_URL": url}, catch_exceptions=False
    )
    wanted = None if value == "none" else float(value)
    assert json.loads(result.stdout)["value"] == wanted, result.output
    assert result.exit_code == (1 if wanted is None else 0)


def test_every_file_shown_is_tried() -> None:
    files = {block.partition("\n")[0].removeprefix("# ") for block in blocks("python")}
    tried = set(re.findall(r"--file (\S+)", "\n".join(command for command, _ in COMMANDS)))
    assert files == tried
    assert len(COMMANDS) == len([line for block in blocks("sh") for line in block.splitlines()])


def test_every_toml_shown_is_rewards_of_a_job() -> None:
    specs = [
        RewardSpec.model_validate(reward)
        for block in blocks("toml")
        for reward in tomllib.loads(block)["rewards"]
    ]
    for spec in specs:
        registry.kind_of(spec.grader).params_type.model_validate(spec.params)
    assert len(specs) == 6


def test_every_grader_setting_and_metric_that_is_named_exists() -> None:
    table = DOCS.partition("## Graders")[2].partition("`GET /graders`")[0]
    named = " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", named)) <= {info.name for info in registry.infos()}
    assert set(re.findall(r"HONE_[A-Z_]+", DOCS)) <= {
        PREFIX + name.upper() for name in Settings.model_fields
    }
    service = create_service(Settings(), ScriptedSandbox(Execution(verdict="ok")))
    names = {
        sample
        for metric in service.registry.collect()
        for sample in (metric.name, f"{metric.name}_total")
    }
    assert set(re.findall(r"`(hone_reward_\w+)", DOCS)) <= names
