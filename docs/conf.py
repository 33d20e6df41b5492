"""Settings of Sphinx, which builds the documentation as a site: ``tox run -e docs``."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conformance.version import __version__

project = "kvconform"
author = "The kvconform contributors"
project_copyright = author
release = __version__
extensions = ["myst_parser"]
exclude_patterns: list[str] = []
html_theme = "furo"
html_title = f"kvconform {release}"
html_last_updated_fmt = None
html_show_copyright = False
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
nitpicky = True

SECTIONS = {"Tutorial": "tutorial", "How to": "how-to", "Explanation": "explanation", "Reference": "reference"}


def _add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Give the index its navigation here, so that the page reads the same where it is not built."""
    if name == app.config.root_doc:
        for caption, folder in SECTIONS.items():
            pages = f"{folder}/*" + ("\ntrack-record\nexamples/*/README" if folder == "reference" else "")
            source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_navigation)
