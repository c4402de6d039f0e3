"""The page in a browser, before the real orchestrator and Redis. The services behind are the fakes
of the contract tests, which answer at once and say what a test wants them to say."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import SecretStr

from shared.wire import RolloutGroup
from tests.support.browser import browser, serious_faults, tab, until
from tests.support.served_stack import ServedStack, quiet_logs, served_stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STEPS = 24
HOSTILE = (
    '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
    "\u202egnp.exe\u2066\x1b[31m"
)
LONG = "a" * 1_000_000
TOKEN = "open-sesame"


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as chrome:
        yield chrome


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    quiet_logs()
    with served_stack(tmp_path_factory.mktemp("page")) as stack:
        stack.fakes.trainer_metrics = {
            "entropy": 0.2,
            "kl": 0.01,
            "mismatch/logprob_diff_mean": 1e-6,
        }
        yield stack


@pytest.fixture(autouse=True)
def cancelled(stack: ServedStack) -> Iterator[None]:
    """Leaves no job to the next test that would keep the only worker."""
    yield
    for job in httpx.get(f"{stack.url}/v1/jobs?limit=100", timeout=60).json()["jobs"]:
        if job["status"] in ("queued", "running", "paused"):
            httpx.post(f"{stack.url}/v1/jobs/{job['id']}/cancel", timeout=60)


def job_text(folder: Path, name: str, **changes: Any) -> str:
    """Returns a job's TOML, with data in `folder`."""
    folder.mkdir(exist_ok=True)
    for kind, count in (("train", 40), ("test", 6)):
        rows = [{"prompt": f"{at} + {at}?", "answer": 2 * at} for at in range(count)]
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"steps": STEPS, "group_size": 4, **changes}
    return f"""name = "{name}"
model = "owner/model"
steps = {values["steps"]}

[data]
train = "{folder / "train.jsonl"}"
eval = "{folder / "test.jsonl"}"

[sampling]
prompts_per_step = 6
group_size = {values["group_size"]}
max_tokens = 4

[[rewards]]
grader = "exact_match"

[evaluation]
every = 4
"""


def start(page: Any, url: str, text: str) -> str:
    """Starts a job from the form; returns its id."""
    page.goto(f"{url}/#/new")
    page.get_by_label("the job, as TOML").fill(text)
    page.get_by_role("button", name="start it").click()
    page.wait_for_url(re.compile("#/jobs/.+"))
    return page.url.rpartition("/")[2]


def test_a_job_is_started_from_the_form_and_watched_to_its_end(
    chrome: Any, stack: ServedStack, tmp_path: Path
) -> None:
    with tab(chrome) as page:
        page.goto(f"{stack.url}/#/new")
        page.get_by_label("the job, as TOML").fill(job_text(tmp_path, "first", group_size=0))
        page.get_by_role("button", name="check it").click()
        fault = page.locator(".faults li").first
        fault.wait_for()
        assert "group_size" in fault.inner_text() and "line 11" in fault.inner_text()
        page.get_by_label("the job, as TOML").fill(job_text(tmp_path, "first"))
        page.get_by_role("button", name="check it").click()
        page.get_by_text("the job is fine").wait_for()
        assert re.search(r"\d+ \+ \d+\?", page.locator(".tried .prompt-box").first.inner_text())
        start(page, stack.url, job_text(tmp_path, "first"))
        page.get_by_text("succeeded").first.wait_for(timeout=120_000)
        assert f"{STEPS}/{STEPS}" in page.locator(".job-head").text_content()
        told = page.get_by_role("img", name=re.compile("^reward: ")).get_attribute("aria-label")
        assert "training reward" in told and f"held-out reward from 0 to 1 at step {STEPS}" in told
        loads = page.evaluate("performance.getEntriesByType('navigation').length")
        assert loads == 1, "it was followed without a reload"


def test_a_metric_is_added_with_its_meaning_and_files_are_what_is_shown(
    chrome: Any, stack: ServedStack, tmp_path: Path
) -> None:
    with tab(chrome) as page:
        start(page, stack.url, job_text(tmp_path, "charts", steps=6))
        page.get_by_text("succeeded").first.wait_for(timeout=120_000)
        page.get_by_label("add a metric").fill("completions/min_length")
        page.get_by_text("Length of the shortest completion.").wait_for()
        page.get_by_role("button", name="add", exact=True).click()
        chart = page.get_by_role("region", name="chart: completions/min_length")
        chart.get_by_role("img").wait_for()
        with page.expect_download() as download:
            chart.get_by_role("button", name="CSV").click()
        text = Path(download.value.path()).read_text()
        assert text.splitlines() == [
            "step,completions/min_length",
            *(f"{n},2" for n in range(1, 7)),
        ]
        with page.expect_download() as download:
            chart.get_by_role("button", name="PNG").click()
        assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
        page.get_by_role("button", name="tokens", exact=True).click()
        told = chart.get_by_role("img").get_attribute("aria-label")
        assert "at tokens 288" in told, told


def test_rollouts_are_opened_from_a_point_and_filtered_by_reward_and_text(
    chrome: Any, stack: ServedStack, tmp_path: Path
) -> None:
    with tab(chrome) as page:
        job = start(page, stack.url, job_text(tmp_path, "rollouts", steps=8))
        page.get_by_text("succeeded").first.wait_for(timeout=120_000)
        over = page.get_by_role("region", name="chart: reward").locator(".u-over")
        box = over.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
        page.wait_for_url(re.compile(r"rollouts\?step=4"))
        page.locator(".completion").first.wait_for()
        groups = page.locator(".group-row")
        assert groups.count() == 6
        spreads = [
            float(re.search(r"spread ([\d.]+)", text)[1]) for text in groups.all_inner_texts()
        ]
        assert spreads == sorted(spreads, reverse=True) and spreads[0] > 0
        page.get_by_role("button", name=re.compile(r"^reward 1: \d+ rollouts")).click()
        until(
            page,
            "[...document.querySelectorAll('.completion .reward')].every(x => x.innerText === '1')",
        )
        page.get_by_role("button", name="all rewards").click()
        prompt = page.locator(".group-row .prompt").nth(3).inner_text()
        page.get_by_label("search the text of the step").fill(prompt)
        until(page, "document.querySelectorAll('.group-row').length === 1")
        assert page.locator("mark").first.inner_text() == prompt
        page.goto(f"{stack.url}/#/jobs/{job}/rollouts?step=999")
        page.get_by_role("alert").filter(has_text="step 999 has no stored rollouts").wait_for()


def test_a_job_is_paused_resumed_with_changes_and_deleted(
    chrome: Any, stack: ServedStack, tmp_path: Path
) -> None:
    with tab(chrome) as page:
        job = start(page, stack.url, job_text(tmp_path, "held", steps=2000))
        head = page.locator(".job-head")
        until(page, "/[1-9]\\d*\\/2000/.test(document.querySelector('.job-head')?.textContent)")
        head.get_by_role("button", name="pause").click()
        dialog = page.get_by_role("dialog")
        assert "its trainer is free for the next job" in dialog.inner_text()
        dialog.get_by_role("button", name="pause").click()
        head.get_by_text("paused").wait_for(timeout=60_000)
        head.get_by_role("button", name="resume").click()
        dialog.get_by_label("changes, a line each").fill("training.loss=gspo")
        dialog.get_by_role("button", name="resume").click()
        assert "training.loss" in dialog.get_by_role("alert").inner_text()
        done = httpx.get(f"{stack.url}/v1/jobs/{job}").json()["step"]
        dialog.get_by_label("changes, a line each").fill(f"steps={done + 3}")
        dialog.get_by_role("button", name="resume").click()
        head.get_by_text("succeeded").wait_for(timeout=60_000)
        head.get_by_role("button", name="delete").click()
        dialog.get_by_label(re.compile("with its checkpoints too")).check()
        dialog.get_by_role("button", name="delete").click()
        page.wait_for_url(re.compile("#/jobs$"))
        assert httpx.get(f"{stack.url}/v1/jobs/{job}").status_code == 404


def test_text_of_models_and_data_is_never_html(
    chrome: Any, stack: ServedStack, tmp_path: Path
) -> None:
    def hostile(group: RolloutGroup) -> RolloutGroup:
        texts = [HOSTILE, LONG, "right", "wrong"]
        rollouts = [
            rollout.model_copy(update={"text": text})
            for rollout, text in zip(group.rollouts, texts, strict=False)
        ]
        return group.model_copy(update={"rollouts": tuple(rollouts)})

    text = job_text(tmp_path, "hostile", steps=1)
    rows = [{"prompt": f"{HOSTILE} {at}", "answer": "x"} for at in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stack.fakes.change["generate"] = hostile
    try:
        with tab(chrome) as page:
            job = start(page, stack.url, text)
            page.get_by_text("succeeded").first.wait_for(timeout=120_000)
            page.goto(f"{stack.url}/#/jobs/{job}/rollouts?step=1")
            page.locator(".completion").first.wait_for()
            shown = page.locator(".group").inner_text()
            assert "<script>window.hacked=1</script>" in shown and "onerror=" in shown
            assert "⟨U+202E⟩gnp.exe⟨U+2066⟩⟨U+001B⟩[31m" in shown
            assert "\u202e" not in shown and len(shown) < 200_000
            assert "show more" in shown
            page.get_by_role("button", name=re.compile("^show more")).first.click()
            assert page.evaluate("window.hacked") is None
            assert page.locator(".group img, .group script").count() == 0
    finally:
        del stack.fakes.change["generate"]


def test_a_lost_connection_is_taken_up_again_without_a_gap(
    chrome: Any, stack: ServedStack, tmp_path: Path
) -> None:
    with tab(chrome) as page:
        job = start(page, stack.url, job_text(tmp_path, "cut", steps=40))
        until(page, "/[1-9]\\d*\\/40/.test(document.querySelector('.job-head')?.textContent)")
        page.context.set_offline(True)
        time.sleep(2)
        page.context.set_offline(False)
        page.get_by_text("succeeded").first.wait_for(timeout=120_000)
        page.goto(f"{stack.url}/#/jobs/{job}/events")
        told = page.get_by_text(re.compile(r"of the newest \d+ events")).inner_text()
        events = httpx.get(f"{stack.url}/v1/jobs/{job}/events").json()["events"]
        assert told.startswith(f"{len(events)} of")


def test_jobs_are_compared_in_one_chart(chrome: Any, stack: ServedStack, tmp_path: Path) -> None:
    with tab(chrome) as page:
        for name in ("low", "high"):
            start(page, stack.url, job_text(tmp_path, name, steps=4))
            page.get_by_text("succeeded").first.wait_for(timeout=120_000)
        page.goto(f"{stack.url}/#/jobs")
        for name in ("low", "high"):
            page.get_by_label(f"compare {name}", exact=True).check()
        page.get_by_role("link", name="Compare 2").click()
        told = page.get_by_role("img", name=re.compile("^reward: "))
        told.wait_for()
        assert re.search(r"low from .*; high from ", told.get_attribute("aria-label"))


VIEWS = ("", "/rollouts?step=4", "/events", "/weights", "/checkpoints", "/talk", "/job")
"""The views of a job."""


@pytest.fixture(scope="module")
def ended(chrome: Any, stack: ServedStack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job that has ended."""
    with tab(chrome) as page:
        job = start(page, stack.url, job_text(tmp_path_factory.mktemp("ended"), "ended", steps=8))
        page.get_by_text("succeeded").first.wait_for(timeout=120_000)
    return job


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_accessible(chrome: Any, stack: ServedStack, ended: str, scheme: str) -> None:
    with tab(chrome, color_scheme=scheme) as page:
        for view in ("/jobs", "/new", "/services", *(f"/jobs/{ended}{view}" for view in VIEWS)):
            page.goto(f"{stack.url}/#{view}")
            page.locator("main").wait_for()
            page.wait_for_timeout(300)
            assert serious_faults(page) == [], (view, scheme)


def test_a_phone_needs_no_scrolling_to_the_side(
    chrome: Any, stack: ServedStack, ended: str
) -> None:
    with tab(chrome, viewport={"width": 390, "height": 800}) as page:
        for view in ("/jobs", "/new", "/services", *(f"/jobs/{ended}{view}" for view in VIEWS)):
            page.goto(f"{stack.url}/#{view}")
            page.locator("main").wait_for()
            page.wait_for_timeout(200)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, view


def test_a_job_is_opened_and_left_by_the_keyboard_alone(
    chrome: Any, stack: ServedStack, ended: str
) -> None:
    with tab(chrome) as page:
        page.goto(f"{stack.url}/#/jobs")
        page.get_by_role("link", name="ended").first.wait_for()
        told = "document.activeElement.getAttribute('href') ?? ''"
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate(told).endswith(f"#/jobs/{ended}"):
                break
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(f"#/jobs/{ended}"))
        delete = page.locator(".job-head").get_by_role("button", name="delete")
        delete.focus()
        page.keyboard.press("Enter")
        page.get_by_role("dialog").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="detached")


def test_services_say_what_they_serve(chrome: Any, stack: ServedStack, ended: str) -> None:
    with tab(chrome) as page:
        page.goto(f"{stack.url}/#/services")
        page.get_by_role("cell", name=re.compile("^trainer")).wait_for()
        rows = page.locator("table").first.locator("tbody tr").all_inner_texts()
        assert [row.split()[1] for row in rows] == ["trainer", "sampler", "reward"]
        assert ended in rows[0] and ended in rows[1] and rows[2].split()[-1] in ("MB", "GB")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    """A stack with a token, and a job that is paused."""
    quiet_logs()
    folder = tmp_path_factory.mktemp("locked")
    with served_stack(folder, token=SecretStr(TOKEN)) as stack:
        yield stack


def test_a_key_that_may_only_read_sees_and_changes_nothing(
    chrome: Any, locked: ServedStack, tmp_path: Path
) -> None:
    def ask(method: str, path: str, **options: Any) -> Any:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = httpx.request(method, f"{locked.url}{path}", headers=headers, **options)
        assert answer.is_success, answer.text
        return answer.json()

    key = ask("POST", "/v1/keys", json={"name": "reader", "access": "read"})["secret"]
    with tab(chrome) as page:
        page.goto(f"{locked.url}/")
        field = page.get_by_label("key", exact=True)
        field.fill("wrong")
        page.get_by_role("button", name="enter").click()
        page.get_by_role("alert").wait_for()
        field.fill(TOKEN)
        page.get_by_role("button", name="enter").click()
        job = start(page, locked.url, job_text(tmp_path, "kept", steps=3000))
        until(page, "/[1-9]\\d*\\/3000/.test(document.querySelector('.job-head')?.textContent)")
        assert TOKEN not in page.content() and TOKEN not in page.url
        page.get_by_role("button", name="forget the key").click()
        field.fill(key)
        page.get_by_role("button", name="enter").click()
        page.goto(f"{locked.url}/#/jobs/{job}")
        page.locator(".job-head").get_by_role("button", name="cancel").click()
        page.get_by_role("dialog").get_by_role("button", name="cancel").click()
        said = page.get_by_role("dialog").get_by_role("alert").inner_text()
        assert "key 'reader' has access 'read'" in said
        assert page.evaluate(
            "Object.keys(localStorage).every(name => !localStorage[name].includes('hone_'))"
        )
    assert ask("GET", f"/v1/jobs/{job}")["status"] == "running"
    ask("POST", f"/v1/jobs/{job}/cancel")
