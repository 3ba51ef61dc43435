"""The site's settings: ``make docs`` builds it from the repository's root.

The source folder is the root, so links between pages mean here what they mean in the
repository. Nothing is fetched while the site is built or read.
"""

import os
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

import jaxcomm

sys.path.insert(0, os.path.dirname(__file__))  # for _directives and others

project = "jaxcomm"
author = "the jaxcomm authors"
release = jaxcomm.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_nb",
    "_directives",
    "_links",
]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "notebooks/*.ipynb"]
# Folders without pages: Sphinx does not walk through them.
exclude_patterns = ["docs/contents.md", ".*", "build", "ffi", "jaxcomm", "tests"]

html_theme = "furo"
html_title = f"jaxcomm {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]

# GitHub's anchors, which links between pages use.
myst_heading_anchors = 4
# The machine's plots, made while the site is built: force, cache or off.
nb_execution_mode = os.environ.get("DOCS_NOTEBOOKS") or "force"
nb_execution_timeout = 900
nb_execution_raise_on_error = True
# The pages show commands' output beside code; it is in no language.
highlight_language = "none"

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
# References must lead somewhere, those to other packages and to inner classes of
# annotations aside.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(collections|datetime|jax|json|numpy|os|pathlib)\b.*"),
    ("py:class", r"jaxcomm\.\w+\..*"),
]


def _append_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the table of contents to the README, which is the first page."""
    if page == root_doc:
        source[0] += "\n" + (Path(app.confdir) / "contents.md").read_text()


def _copy_first_page(app: Sphinx, error: Exception | None) -> None:
    """Make the first page the one that a browser opens."""
    if error is None and app.builder.name == "html":
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Connect what stands above."""
    app.connect("source-read", _append_contents)
    app.connect("build-finished", _copy_first_page)
