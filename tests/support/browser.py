"""A browser for tests of the page: Playwright with the Chromium of the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AXE = ROOT / "requirements/page/node_modules/axe-core/axe.min.js"

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Returns the machine's Chromium. Skips the test without one."""
    pytest.importorskip("playwright", reason="needs Playwright, which `make setup` installs")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("needs Chromium: `make browser` installs Debian's, or CHROMIUM names one")
    return found


@contextlib.contextmanager
def browser() -> Generator[Any]:
    """Yields a Chromium without a window."""
    executable = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=executable, args=options)
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def tab(chrome: Any, **options: Any) -> Generator[Any]:
    """Yields a tab of a new profile. Raises AssertionError for an uncaught error on the page, and
    for anything that its policy refused."""
    context = chrome.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
    context.set_default_timeout(30_000)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"{error}"))
    page.on(
        "console",
        lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None,
    )
    try:
        yield page
        assert not faults, faults
    finally:
        context.close()


def serious_faults(page: Any) -> list[str]:
    """Returns what axe-core finds on the page that is serious or critical for people who use a
    keyboard or a screen reader, or see no colours. Skips the test without axe-core."""
    if not AXE.exists():
        pytest.skip("needs axe-core: `make browser` installs it")
    page.evaluate(AXE.read_text())
    return page.evaluate(
        """axe.run().then(({ violations }) => violations
            .filter(({ impact }) => impact === "serious" || impact === "critical")
            .map(({ id, nodes }) => `${id}: ${nodes.length} x ${nodes[0].html.slice(0, 200)}`))"""
    )


def until(page: Any, expression: str, limit_s: float = 60.0) -> None:
    """Waits until the JavaScript expression is true. The page's policy refuses the `eval` by which
    Playwright's own `wait_for_function` polls."""
    end = time.monotonic() + limit_s
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not true within {limit_s} s: {expression}"
        time.sleep(0.05)
