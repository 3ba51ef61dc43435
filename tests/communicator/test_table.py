"""How communicators are listed, as text and in notebooks."""

import re

import jax
import numpy as np

import jaxcomm
from jaxcomm.communicator import text_table


def test_the_table_counts_calls_and_bytes(make_mesh, psum_over):
    assert str(jaxcomm.communicators()).startswith("mesh axes")
    mesh = make_mesh(data=2, context=4)
    jaxcomm.init(mesh, "data", ("data", "context"))
    for _ in range(3):
        jax.block_until_ready(psum_over(mesh, "data")(np.ones((8, 1000), np.float32)))

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

    text = jaxcomm.communicators()._repr_html_()
    assert text.count("<td>") == 9
    assert "&lt;b&gt;&amp;" in text


def test_what_a_notebook_shows_is_a_table(make_mesh, psum_over):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, lanes="<b>")
    memory = jaxcomm.memory_report()
    assert repr(memory).splitlines()[2].startswith("i          <b>   0 B ")
    layout = jaxcomm.Layout("zigzag", 4, 64)
    compared = jaxcomm.attention.compare_strategies(layout, heads=4, head_size=64)
    assert repr(compared) == str(compared)
    for table, said in (memory, "<td>&lt;b&gt;</td>"), (compared, "<td>&gt; "):
        drawn = table._repr_html_()
        assert drawn.startswith("<table>")
        assert said in drawn
    compiled = psum_over(mesh, "i").lower(np.ones(2, np.float32)).compile()
    counted = "1 calls of jaxcomm, 0 collectives of XLA"
    assert str(jaxcomm.collectives_of(compiled)) == counted
    assert repr(jaxcomm.collectives_of(compiled)) == f"<{counted}: 1 all_reduce>"


def test_numbers_are_listed_in_order_and_milliseconds_carry_over():
    listed = [text_table.numbers(of) for of in ([], [4], [1, 0], [5, 3, 4, 5], [1, 3])]
    assert listed == ["", "4", "0, 1", "3-5", "1, 3"]
    assert text_table.clock(59.9996).endswith(":00.000")
    assert text_table.clock(59.9994).endswith(":59.999")
