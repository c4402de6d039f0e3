"""The pages agree with the project: the demo's job as it is, and commands, settings and keys that
exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from deploy import pages
from hone import cli
from hone.commands.explain import find
from shared.job.file import parse_job
from shared.settings import FILE, PREFIX, REWARD_FILE, ROW, Settings, secret_variables

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "AGENTS.md", "skills/hone/SKILL.md", "examples/README.md"]
PAGES += [f"docs/{page.name}" for page in ROOT.glob("docs/*.md")]
EXPLAINED = re.compile(r"(?:`|bin/)hone explain ([\w.]+)")
README = (ROOT / "README.md").read_text()
RECIPES = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("training", "data"))
LEAST = {
    "name": "a",
    "model": "m",
    "steps": 100,
    "data": {"train": "t.jsonl", "eval": "e.jsonl"},
    "rewards": [{"grader": "length"}],
}


def test_the_job_in_the_readme_is_the_demos() -> None:
    (shown,) = re.findall(r"```toml\n(# The job of.*?)```", README, re.DOTALL)
    assert shown == (ROOT / "deploy/jobs/demo.toml").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_target_in_a_page_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    assert set(re.findall(r"(?:`|bin/)hone (\w+)", text)) <= cli.find_commands().keys()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^ +)make ([\w-]+)", text, re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "SECURITY.md"])
def test_prose_has_lines_of_at_most_100_columns(page: str) -> None:
    prose = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.M)
    lines = [line for line in prose.splitlines() if not re.match(r" *\||    ", line)]
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("page", pages.WRITTEN)
def test_what_make_docs_writes_is_as_the_code_says(page: str) -> None:
    assert pages.page_of(page).read_text() == pages.current(page), "run `make docs`"


def test_the_list_of_pages_for_language_models_is_whole() -> None:
    text = pages.LLMS.read_text()
    assert text == pages.llms_page(), "run `make docs`"
    assert {*re.findall(r"\(docs/([\w-]+)\.md\)", text)} == {p.stem for p in ROOT.glob("docs/*.md")}


def test_every_page_has_its_place_in_the_site() -> None:
    named = re.findall(r"^docs/([\w-]+)$", (ROOT / "docs/site/contents.txt").read_text(), re.M)
    made = {"rest_orchestrator", "rest_rollout", "rest_trainer", "rest_reward"}
    made |= {"python", "job_keys", "settings"}
    assert {*named} - made == {page.stem for page in ROOT.glob("docs/*.md")}


def test_every_key_that_explain_is_shown_with_exists() -> None:
    keys = {key for page in PAGES for key in EXPLAINED.findall((ROOT / page).read_text())}
    assert {find(key).text != "" for key in keys} == {True}


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_and_link_in_a_page_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    settings |= {variable + FILE for variable in secret_variables().values()}
    settings |= {ROW, REWARD_FILE}
    assert set(re.findall(r"HONE_[A-Z_]+\b", text)) - {PREFIX} <= settings
    for path in re.findall(r"\]\(([\w/.-]+)(?:#[\w-]+)?\)", text):
        assert (ROOT / page).parent.joinpath(path).exists(), path


@pytest.mark.parametrize("service", ["orchestrator", "rollout", "trainer", "reward"])
def test_every_route_in_the_architecture_exists(service: str) -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    (row,) = re.findall(rf"^\| {service} \| (`(?:POST|PUT).*) \|$", text, re.MULTILINE)
    sources = "".join(path.read_text() for path in (ROOT / "services" / service).rglob("*.py"))
    sources = sources.replace(":path}", "}")
    routes = re.findall(r"`(?:[A-Z]+ )?(/[\w/{}]+)`", row)
    assert len(routes) > 4 and [route for route in routes if f'{route}"' not in sources] == []


@pytest.mark.parametrize("recipe", re.findall(r"```toml\n(.*?)```", RECIPES, re.DOTALL))
def test_a_recipe_is_part_of_a_job(recipe: str) -> None:
    sections = tomllib.loads(recipe)
    job = parse_job(LEAST | sections).model_dump(mode="json")
    for section, keys in sections.items():
        assert {key: job[section][key] for key in keys} == keys


def test_the_smallest_agent_reads_columns_that_the_rows_of_its_job_have() -> None:
    text = (ROOT / "docs/agents.md").read_text().partition("\n## Sessions")[0]
    (agent,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    given = parse_job(LEAST | tomllib.loads(toml)).data
    assert given.train == "rows.jsonl" and given.columns == {}
    (row,) = re.findall(r"rows.jsonl is as (\{.*\})", toml)
    assert {"prompt", *re.findall(r'row\["(\w+)"\]', agent)} == json.loads(row).keys()
