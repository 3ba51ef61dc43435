"""docs/ring.svg is what docs/_ring.py draws, and what it shows is so."""

import collections
import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def ring():
    spec = importlib.util.spec_from_file_location("ring", DOCS / "_ring.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_up_to_date(ring):
    assert (DOCS / "ring.svg").read_text() == ring.picture()


def test_tiles_cover_the_causal_square_once(ring):
    seen = np.zeros((ring.CHUNKS, ring.CHUNKS), int)
    for _, _, query, key in ring.tiles():
        seen[query, key] += 1
    np.testing.assert_array_equal(seen, np.tri(ring.CHUNKS, dtype=int))


def test_ranks_do_the_same_work_at_each_hop(ring):
    work = collections.Counter()
    for hop, rank, query, key in ring.tiles():
        work[hop, rank] += 1 if query != key else 0.5
    assert len(work) == ring.RANKS**2
    assert set(work.values()) == {2}


def test_blocks_travel_as_ring_shift_sends_them(ring, make_mesh):
    """At hop h rank r holds the block of rank r - h, as the tiles have it."""
    mesh = make_mesh(i=ring.RANKS)
    shift = jax.shard_map(
        lambda x: jaxcomm.ring_shift(x, "i"),
        mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"),
    )  # fmt: skip
    held = jax.jit(shift)(jnp.arange(ring.RANKS))
    assert held.tolist() == [(r - 1) % ring.RANKS for r in range(ring.RANKS)]


def test_animations_are_well_formed(ring):
    found = [e for e in ET.fromstring(ring.picture()).iter() if "keyTimes" in e.attrib]
    assert len(found) > 30
    for each in found:
        times = [float(t) for t in each.attrib["keyTimes"].split(";")]
        assert len(times) == len(each.attrib["values"].split(";"))
        assert times == sorted(times)
        assert (times[0], times[-1]) == (0, 1)
    assert not re.search(r"https?://(?!www\.w3\.org)", ring.picture())
