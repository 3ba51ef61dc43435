"""Two Sphinx directives: the public names of a group, and the help of a command.

A page of ``docs/api`` names its group in ``public-names``. The names come from what
jaxcomm exports and the groups from where it defines them, so a new name needs no page.
"""

import inspect
import os
import subprocess
import sys
from typing import Any

from _names import RETURNED, group_of, public_objects
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective


class PublicNames(SphinxDirective):
    """Document the public names of a group: a table, then each name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return what autosummary and autodoc make of the names."""
        members = [
            (name, found)
            for name, found in public_objects()
            if group_of(name, found) == self.arguments[0]
        ]
        if not members:
            raise self.error(f"no public name is in the group {self.arguments[0]!r}")
        lines = [".. highlight:: default", "", ".. autosummary::", ""]
        lines += [f"   ~{name}" for name, _ in members]
        for name, found in members:
            if inspect.isclass(found):
                lines += ["", f".. autoclass:: {name}", "   :members:"]
            else:
                lines += ["", f".. autofunction:: {name}"]
        text = "\n".join(["````{eval-rst}", *lines, "````"])
        return self.parse_text_to_nodes(text, allow_section_headings=False)


class CommandHelp(SphinxDirective):
    """Show what ``python -m MODULE --help`` prints."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the output as a literal block."""
        shown = subprocess.run(
            [sys.executable, "-P", "-m", self.arguments[0], "--help"],
            env=os.environ | {"COLUMNS": "88", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return [nodes.literal_block(shown.stdout, shown.stdout, language="none")]


# Pages of other projects. JAX's types say where they are defined, which is no page.
_JAX = "https://docs.jax.dev/en/latest"
OTHERS = {
    "jax.Array": f"{_JAX}/_autosummary/jax.Array.html",
    "jax.Mesh": f"{_JAX}/jax.sharding.html#jax.sharding.Mesh",
    "jax.AbstractMesh": f"{_JAX}/jax.sharding.html#jax.sharding.AbstractMesh",
    "numpy.ndarray": "https://numpy.org/doc/stable/reference/generated/numpy.ndarray.html",
}


def _resolve(app: Sphinx, env: Any, node: Any, text: nodes.Node) -> nodes.Node | None:
    """Lead a reference to a public name, or to the page of another project."""
    root, _, _ = node.get("reftarget", "").partition(".")
    last = node.get("reftarget", "").rpartition(".")[2]
    if page := OTHERS.get(f"{root}.{last}"):
        return nodes.reference("", "", text, refuri=page, internal=False)
    for name, found in public_objects():
        if name.rpartition(".")[2] == last and node["reftarget"] in (
            last,
            f"{found.__module__}.{last}",
        ):
            domain = env.get_domain("py")
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", name, node, text
            )
    return None


def _hide_parameters(app, what, name, found, options, signature, returns):
    """Show a class without parameters if users do not make its objects."""
    if what == "class" and name.removeprefix("jaxcomm.") in RETURNED:
        return "", None
    return None


def _forget_overloads(app: Sphinx) -> None:
    """Show the arguments of a function, and not those of its overloads.

    An overload tells type checkers what ``return_residual`` changes. It calls the other
    arguments ``**options``.
    """
    for _, found in public_objects():
        analyzer = ModuleAnalyzer.for_module(found.__module__)
        analyzer.analyze()
        analyzer.overloads.clear()


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives."""
    app.connect("builder-inited", _forget_overloads)
    app.add_directive("public-names", PublicNames)
    app.add_directive("command-help", CommandHelp)
    app.connect("missing-reference", _resolve)
    app.connect("autodoc-process-signature", _hide_parameters)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
