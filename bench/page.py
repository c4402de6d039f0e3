"""How fast the page is: `python -m bench.page`. A browser looks at an orchestrator with 200 jobs,
one of them a run of 2,000 steps of 512 completions that continues.

- first paint: from the request of the page until the list of jobs, the run's charts, or a step's
  rollouts are drawn, each in a new profile, so with nothing in the browser's cache;
- update latency: from a step's event in Redis until the page shows the step;
- bytes per step: what the page receives for a step of a run that it shows;
- memory: the heap of the tab after 5,000 further events, over its heap before them.

It uses the Chromium and Playwright of the tests (`make browser`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.report import Figure, count, finish, repeated
from bench.side import start, told
from tests.support.browser import browser, tab, until

JOBS, EVENTS = 200, 5000
PAINT_GOAL_MS, LATENCY_GOAL_MS = 1000.0, 500.0
BYTES_GOAL, MEMORY_GOAL_MB = 10_000.0, 30.0

SEEN = """
window.seen = new Promise((resolve) => {
  const look = () => {
    if (document.querySelector(%s)) resolve(performance.now());
    else requestAnimationFrame(look);
  };
  look();
});
"""
"""Resolves with the milliseconds since the navigation when an element is there: a frame later than
it was made, so it is drawn."""

WATCH = """
window.shown = {};
new MutationObserver(() => {
  const step = /([0-9]+)\\/20000/.exec(document.querySelector(".job-head")?.textContent)?.[1];
  if (step && !(step in window.shown)) window.shown[step] = Date.now();
}).observe(document.body, {childList: true, subtree: true, characterData: true});
"""

PAINTS = {
    "first paint, 200 jobs": ("#/jobs", ".job .name"),
    "first paint, 2,000 steps": ("#/jobs/{job}", ".chart .u-over"),
    "first paint, 512 completions": ("#/jobs/{job}/rollouts?step=1000", ".completion .body"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__)
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--events", type=count, default=EVENTS)
    given = parser.parse_args()
    with orchestrator() as (side, at), browser() as chrome:
        figures = [
            repeated(
                name,
                [painted(chrome, f"{at['url']}/{place}", element) for _ in range(given.repeats)],
                "ms",
                PAINT_GOAL_MS,
                "max",
            )
            for name, (place, element) in (
                (name, (place.format(**at), element)) for name, (place, element) in PAINTS.items()
            )
        ]
        figures += followed(chrome, side, f"{at['url']}/#/jobs/{at['job']}", given.events)
    facts = {"jobs": JOBS, "steps": 2000, "completions": 512, "events": given.events}
    sys.exit(finish("page", figures, **facts, repeats=given.repeats))


@contextmanager
def orchestrator() -> Generator[tuple[Any, dict[str, str]]]:
    """Yields the side, and its URL and the long run's id."""
    with tempfile.TemporaryDirectory(prefix="hone-page-") as folder:
        side = start("bench.page_side", json.dumps({"folder": folder, "jobs": JOBS}))
        try:
            found = told(side)
            if found is None:
                raise SystemExit("the orchestrator did not start")
            yield side, found
        finally:
            side.terminate()
            side.wait()


def painted(chrome: Any, url: str, element: str) -> float:
    """Returns the milliseconds until the element is drawn, in a new profile."""
    with tab(chrome) as page:
        page.add_init_script(SEEN % json.dumps(element))
        page.goto(url, wait_until="commit")
        return page.evaluate("window.seen")


def followed(chrome: Any, side: Any, url: str, num_events: int) -> Sequence[Figure]:
    with tab(chrome) as page:
        page.goto(url)
        page.locator(".chart .u-over").first.wait_for()
        page.evaluate(WATCH)
        protocol = page.context.new_cdp_session(page)
        received = [0]
        protocol.on(
            "Network.dataReceived",
            lambda event: received.append(event["encodedDataLength"] or event["dataLength"]),
        )
        protocol.send("Network.enable")
        page.wait_for_timeout(2000)
        received.clear()
        steps = add(side, 30, 1, 0.2)
        until(page, f"{steps['step']} in window.shown")
        shown = page.evaluate("window.shown")
        first = steps["step"] - len(steps["written"]) + 1
        late = [
            shown[str(first + at)] - 1000 * time_s
            for at, time_s in enumerate(steps["written"])
            if str(first + at) in shown
        ]
        size = sum(received) / len(steps["written"])
        before = heap_mb(protocol)
        steps = add(side, num_events, 50, 0.05)
        until(page, f"{steps['step']} in window.shown", 300)
        after = heap_mb(protocol)
    return (
        repeated("update latency", late, "ms", LATENCY_GOAL_MS, "max"),
        Figure("bytes per step", size, "bytes", BYTES_GOAL, "max"),
        Figure("tab memory", after, "MB"),
        Figure("tab memory, growth", after - before, "MB", MEMORY_GOAL_MB, "max"),
    )


def add(side: Any, count: int, at_once: int, pause_s: float) -> dict[str, Any]:
    """Lets the run continue by so many steps; returns when each was written."""
    side.stdin.write(json.dumps([count, at_once, pause_s]) + "\n")
    side.stdin.flush()
    found = told(side)
    assert found is not None, "the orchestrator ended"
    return found


def heap_mb(protocol: Any) -> float:
    protocol.send("HeapProfiler.collectGarbage")
    protocol.send("Performance.enable")
    metrics = protocol.send("Performance.getMetrics")["metrics"]
    return next(one["value"] for one in metrics if one["name"] == "JSHeapUsedSize") / 1e6


if __name__ == "__main__":
    main()
