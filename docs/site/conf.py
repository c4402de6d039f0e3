"""Sphinx's settings for the site that `make site` builds."""

from __future__ import annotations

from importlib.metadata import version as version_of

from sphinx.application import Sphinx

project = "Hone"
project_copyright = "the authors of Hone, Apache-2.0"
version = release = version_of("hone-rl")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"Hone {version}"
html_copy_source = False
html_show_sphinx = False
smartquotes = False

myst_heading_anchors = 4
default_role = "literal"  # docstrings have names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
python_display_short_literal_types = True
suppress_warnings = ["myst.header"]  # a page begins with "Changelog", and continues as it likes


def indented_is_code(
    _app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Makes a code block of what a docstring indents after an empty line, as Markdown has it."""
    for number in range(len(lines) - 1, 0, -1):
        begins = lines[number].startswith("    ") and not lines[number - 1].strip()
        before = next((line for line in reversed(lines[:number]) if line.strip()), "")
        if begins and before and not before.startswith(" "):
            lines[number:number] = ["::", ""]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", indented_is_code)
