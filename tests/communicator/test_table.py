"""How communicators are listed, as text and in notebooks."""

import html.parser
import re

import jax
import numpy as np

import jaxcomm


def psum(mesh, x, axes, **options):
    def local(x):
        return jaxcomm.psum(x, axes, **options)

    spec = jax.P(tuple(mesh.axis_names))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.block_until_ready(jax.jit(mapped)(x))


def test_the_table_counts_calls_and_bytes(make_mesh):
    mesh = make_mesh(data=2, context=4)
    jaxcomm.init(mesh, ["data", ("data", "context")])
    for _ in range(3):
        psum(mesh, np.ones((8, 1000), np.float32), "data")
    lines = str(jaxcomm.communicators()).splitlines()
    columns = re.split(r"  +", lines[0])
    assert columns == [
        "mesh axes", "lane", "backend", "size", "groups", "calls", "bytes", "memory",
        "state",
    ]  # fmt: skip
    assert set(lines[1]) == {"-", " "}
    rows = [
        dict(zip(columns, re.split(r"  +", line), strict=True)) for line in lines[2:]
    ]
    assert [row["mesh axes"] for row in rows] == ["data", "data x context"]
    # Three calls of 4,000 bytes from each of eight ranks.
    assert (rows[0]["calls"], rows[0]["bytes"]) == ("3", "93.8 KiB")
    assert (rows[1]["calls"], rows[1]["bytes"]) == ("0", "0 B")
    assert [row["size"] + "x" + row["groups"] for row in rows] == ["2x4", "8x1"]
    assert {row["state"] for row in rows} == {"live"}
    assert repr(jaxcomm.communicators()) == str(jaxcomm.communicators())
    assert jaxcomm.communicators()[0].stats()["bytes"] == 96_000


def test_the_table_is_html_in_a_notebook(make_mesh):
    jaxcomm.init(make_mesh(i=2), lanes="<b>&")

    class Cells(html.parser.HTMLParser):
        def __init__(self):
            super().__init__()
            self.tags, self.texts = [], []

        def handle_starttag(self, tag, attrs):
            self.tags.append(tag)

        def handle_data(self, data):
            self.texts.append(data)

    cells = Cells()
    cells.feed(jaxcomm.communicators()._repr_html_())
    assert cells.tags.count("table") == 1
    assert cells.tags.count("tr") == 2
    assert cells.tags.count("th") == cells.tags.count("td") == 9
    assert "<b>&" in "".join(cells.texts)
    assert "b" not in cells.tags


def test_an_empty_table_has_its_head(make_mesh):
    assert str(jaxcomm.communicators()).startswith("mesh axes")
    assert "<table>" in jaxcomm.communicators()._repr_html_()
    assert len(jaxcomm.communicators()) == 0


def test_a_slice_of_the_table_is_a_table(make_mesh):
    jaxcomm.init(make_mesh(a=2, b=2))
    table = jaxcomm.communicators()
    assert isinstance(table[:2], jaxcomm.Communicators)
    assert [c.axes for c in table[1:]] == [("b",), ("a", "b")]
    assert table[-1].axes == ("a", "b")
    assert "a x b" not in str(table[:2])


def test_index_groups_show_in_the_table(make_mesh):
    groups = [[0, 3], [1, 2]]
    psum(make_mesh(i=4), np.zeros(4, np.float32), "i", axis_index_groups=groups)
    assert "i in [[0, 3], [1, 2]]" in str(jaxcomm.communicators())


def test_the_xla_backend_shows_and_says_that_xla_counts(make_mesh):
    jaxcomm.init(make_mesh(i=2), backend="xla")
    assert str(jaxcomm.communicators()).splitlines()[2].count("in XLA") == 2
