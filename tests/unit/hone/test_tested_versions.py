"""Which versions of packages were tested, and what `hone doctor` says of the installed ones."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from hone import stack
from hone.commands import doctor
from tests.compat import versions

MONDAY, TUESDAY = date(2026, 11, 30), date(2026, 12, 1)
OLD = {"torch": "2.9.1", "deepspeed": "0.19.8", "transformers": "5.19.0"}
NEW = {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.19.0"}


def test_what_passed_again_gets_the_new_day_in_the_order_of_versions() -> None:
    rows = [
        {"part": "trainer", "packages": NEW, "on": MONDAY},
        {"part": "client", "packages": {"trl": "1.16.0"}, "on": MONDAY},
    ]
    passed = [("trainer", tuple(NEW.items())), ("trainer", tuple(OLD.items()))]
    assert versions.merged(rows, passed, TUESDAY) == [
        {"part": "client", "packages": {"trl": "1.16.0"}, "on": MONDAY},
        {"part": "trainer", "packages": OLD, "on": TUESDAY},
        {"part": "trainer", "packages": NEW, "on": TUESDAY},
    ]


def test_a_file_is_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tested.toml"
    versions.write([("sampler", (("vllm", "0.32.0"),))], path)
    versions.write([("sampler", (("vllm", "0.33.0"),))], path)
    text = path.read_text()
    assert text.index('vllm = "0.32.0"') < text.index('vllm = "0.33.0"')


@pytest.mark.parametrize(
    ("torch", "state", "said"),
    [
        (
            "2.13.0",
            "ok",
            "torch 2.13.0, deepspeed 0.19.8, transformers 5.19.0: tested together on 2026-11-30",
        ),
        (
            "2.12.0",
            "note",
            "torch 2.12.0, deepspeed 0.19.8, transformers 5.19.0: not tested together; tested: "
            "torch 2.13.0, deepspeed 0.19.8, transformers 5.19.0 (docs/versions.md)",
        ),
    ],
)
def test_doctor_says_whether_the_installed_versions_were_tested(
    torch: str, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"torch": f"{torch}+cpu", "deepspeed": "0.19.8", "transformers": "5.19.0"}
    monkeypatch.setattr(stack, "version_of", here.get)
    monkeypatch.setattr(doctor, "tested", lambda part: [(NEW, MONDAY)] if part == "trainer" else [])
    check = doctor.versions_of("trainer")
    assert check == doctor.Check("trainer versions", state, said)
    assert doctor.versions_of("sampler") is None  # no vLLM here


def test_the_pinned_versions_and_the_ends_of_the_ranges_are_tested() -> None:
    for part, ends in (("trainer", ("2.11", "2.15")), ("sampler", ("0.32", "0.33"))):
        rows = [packages for packages, _ in stack.tested(part)]
        assert stack.installed(part) in rows
        newest = stack.TESTED[part][0]
        for end in ends:
            assert any(packages[newest].startswith(f"{end}.") for packages in rows), end
