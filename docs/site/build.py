"""`make site`: the pages of docs/, the README and its neighbours, and the reference of Python,
REST, jobs and settings, as a site in site/ that loads nothing from elsewhere. A dead link, a
docstring that cannot be read and a resource of another host are errors.

The pages are written for GitHub. Here they are copied, and links to the code become plain text."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from sphinx.cmd.build import build_main

from deploy.pages import HEAD, params, row
from docs.site import rest
from hone.commands.explain import Explanation, find
from services.orchestrator.app import create_service as create_orchestrator
from services.orchestrator.store.store import Store
from services.reward.app import create_service as create_reward
from services.rollout.app import create_service as create_rollout
from services.rollout.sampler import Sampler
from services.trainer.app import create_service as create_trainer
from shared.settings import Settings

ROOT = Path(__file__).parents[2]
OWN, SOURCE, SITE = Path(__file__).parent, ROOT / "build/site", ROOT / "site"
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"\[([^\[\]]*)\]\(([\w./-]+)(#[\w-]+)?\)")
FETCHED = re.compile(
    r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=[\"']((?:https?:)?//[^\"']+)"
    r"|(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)"
)
"""What a browser loads automatically."""


def stage() -> None:
    """Puts what Sphinx reads into SOURCE."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE / "docs", ignore=shutil.ignore_patterns("site"))
    for name in TOP:
        shutil.copy(ROOT / name, SOURCE / name)
    for page in SOURCE.rglob("*.md"):
        page.write_text(_for_the_site(page.read_text(), page.relative_to(SOURCE)))
    (SOURCE / "README.md").rename(SOURCE / "index.md")
    for page in OWN.glob("*.md"):
        shutil.copy(page, SOURCE / "docs" / page.name)
    with (SOURCE / "index.md").open("a") as index:
        index.write((OWN / "contents.txt").read_text())
    (SOURCE / "docs/job_keys.md").write_text(_keys("Keys of a job", "job"))
    (SOURCE / "docs/settings.md").write_text(_keys("Settings", "settings"))
    for name, document in documents().items():
        (SOURCE / f"docs/rest_{name}.md").write_text(rest.page(name, document))


def _for_the_site(text: str, page: Path) -> str:
    """Returns a page whose links lead to pages; a link to a file of the repository is its text."""

    def link(match: re.Match[str]) -> str:
        said, target, anchor = match[1], match[2], match[3] or ""
        found = (ROOT / page.parent / target).resolve()
        if found == ROOT / "README.md":
            return f"[{said}]({target.replace('README', 'index')}{anchor})"
        elsewhere = found.exists() and not (SOURCE / page.parent / target).exists()
        return said if elsewhere else match[0]

    return LINK.sub(link, text).replace("```mermaid", "```text")


def _keys(title: str, of: str) -> str:
    """Returns the page with all keys that `hone explain` has under this name."""
    told = find(of)
    sections: list[tuple[str, Explanation]] = [("", told)]
    sections += [(f"## {each.key}\n\n{each.text}\n", each) for each in told.fields if each.fields]
    lines = [f"# {title}\n", f"`hone explain {of}` shows the same in the shell.\n"]
    for head, section in sections:
        fields = list(params(section)) if head else [it for it in told.fields if not it.fields]
        lines += [head, *HEAD, *(row(each.key, each) for each in fields), ""]
    return "\n".join(lines)


def documents() -> dict[str, dict[str, Any]]:
    """Returns the OpenAPI document of each service."""
    settings, unused = Settings(sandbox="unsafe"), cast(Any, None)
    made = {
        "orchestrator": create_orchestrator(settings, Store("redis://127.0.0.1:1")),
        "rollout": create_rollout(settings, Sampler(unused, (), unused)),
        "trainer": create_trainer(settings, unused, unused, {}),
        "reward": create_reward(settings),
    }
    return {name: service.app.openapi() for name, service in made.items()}


def fetched(site: Path) -> Iterator[str]:
    """Yields what the pages and styles of the site load from other hosts."""
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        for found in FETCHED.findall(file.read_text()):
            yield f"{file.relative_to(site)} loads {''.join(found)}"


def main() -> None:
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(OWN)]
    if build_main([*options, "-d", str(ROOT / "build/doctrees"), str(SOURCE), str(SITE)]):
        sys.exit("site: see above")
    if loads := list(fetched(SITE)):
        sys.exit("\n".join(loads))


if __name__ == "__main__":
    main()
