"""The page's libraries are as they were copied, and its metrics are those that Hone measures."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "services/orchestrator/extensions/page"
SOURCES = (
    ROOT / "services/orchestrator/grpo/metrics.py",
    ROOT / "services/trainer/learning/metrics.py",
    ROOT / "services/trainer/zero/update.py",
)


def test_the_libraries_are_what_make_page_copied() -> None:
    listed = dict(
        line.split()[::-1] for line in (PAGE / "vendor/SHA256SUMS").read_text().splitlines()
    )
    files = [path for path in (PAGE / "vendor").rglob("*") if path.is_file()]
    own = {str(path.relative_to(PAGE / "vendor")) for path in files} - {"SHA256SUMS"}
    assert own == set(listed)
    for name, digest in listed.items():
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == digest, name


def test_every_metric_that_has_a_name_in_the_code_has_a_meaning() -> None:
    meanings = [one["name"] for one in json.loads((PAGE / "meanings.json").read_text())]
    patterns = [re.sub(r"<[^>]*>", ".+", re.escape(name)) for name in meanings]
    for source in SOURCES:
        text = source.read_text()
        named = re.findall(r'^\s+f?"([a-z_]+(?:/[a-z_0-9/]+)?)"(?=:|,$)', text, re.M)
        named += re.findall(r'\["([a-z_]+/[a-z_0-9/]+)"\] = ', text)
        for name in {name for name in named if "/" in name}:
            assert any(re.fullmatch(pattern, name) for pattern in patterns), name
