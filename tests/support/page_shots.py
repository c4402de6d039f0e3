"""The pictures of the page in the documentation, of the run of `make demo`:
`python -m tests.support.page_shots runs/demo docs`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.browser import browser, tab

SIZE = {"width": 1180, "height": 760}
MOST_BYTES = 150_000

SHOTS = {
    "page.png": ("", ".chart .u-over", "light"),
    "page_rollouts.png": ("/rollouts?step=5", ".completion .body", "light"),
}
"""The picture's name, the view of the job, what is waited for, and the colours."""


def main(run: str, to: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "services.orchestrator.extensions.page.view",
        "--output",
        "json",
        run,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        try:
            assert view.stdout
            url = json.loads(view.stdout.readline())["url"]
            with browser() as chrome:
                for name in SHOTS:
                    _take(chrome, f"{url}#/jobs/{Path(run).resolve().name}", to / name)
        finally:
            view.terminate()


def _take(chrome: Any, job: str, file: Path) -> None:
    view, element, scheme = SHOTS[file.name]
    with tab(chrome, viewport=SIZE, color_scheme=scheme) as page:
        page.goto(job + view)
        page.locator(element).first.wait_for()
        page.locator(".well, .findings").first.wait_for()
        page.screenshot(path=file)
    size = file.stat().st_size
    assert size < MOST_BYTES, f"{file}: {size} bytes, expected fewer than {MOST_BYTES}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
