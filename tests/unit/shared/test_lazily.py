"""Packages that import what they have when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared import job, wire


def modules_after(code: str) -> set[str]:
    """Returns the modules that a fresh Python has imported once it ran the code."""
    code = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


@pytest.mark.parametrize("package", [wire, job])
def test_a_package_has_all_that_it_names(package: object) -> None:
    for name in dir(package):
        assert getattr(package, name) is not None or name == "__file__", name


def test_a_body_is_imported_without_those_of_other_services() -> None:
    found = modules_after("from shared.wire import WaitRequest")
    assert "shared.wire.base" in found
    assert not {"shared.wire.rollouts", "shared.wire.jobs", "shared.job.job"} & found


def test_what_a_package_lacks_is_an_import_error() -> None:
    code = "try:\n from shared.wire import Nothing\nexcept ImportError as error:\n print(error)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot import name 'Nothing' from 'shared.wire'" in ended.stdout
