"""A Sphinx extension: check links to other sites without visiting them, and list them.

Sphinx itself checks links between pages. The list is in ``external-links.txt``.
"""

from pathlib import Path
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

_log = logging.getLogger(__name__)


def fault(link: str) -> str | None:
    """Return what is wrong with a link to another site, None if nothing is.

    >>> fault("https://semver.org"), fault("http://semver.org")
    (None, 'it does not begin with https')
    >>> fault("https://semver"), fault("https://semver.org/a b")
    ('it has no host', 'it has a blank')
    """
    parts = urlsplit(link)
    if parts.scheme != "https":
        return "it does not begin with https"
    if "." not in parts.netloc.strip("."):
        return "it has no host"
    return "it has a blank" if len(link.split()) != 1 else None


def _collect(app: Sphinx, tree: nodes.document, page: str) -> None:
    found = app.env.__dict__.setdefault("external_links", {})
    for node in tree.findall(nodes.reference):
        link = node.get("refuri", "")
        if "://" not in link:
            continue
        found.setdefault(link, set()).add(page)
        wrong = fault(link)
        if wrong:
            _log.warning("the link %r: %s", link, wrong, location=node)


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    found = app.env.__dict__.get("external_links", {})
    lines = [f"{link}  {' '.join(sorted(pages))}\n" for link, pages in found.items()]
    (Path(app.outdir) / "external-links.txt").write_text("".join(sorted(lines)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect what stands above."""
    app.connect("doctree-resolved", lambda app, tree, page: _collect(app, tree, page))
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
