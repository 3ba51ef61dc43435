"""Axes, lanes, backends and random keys that are refused while tracing."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="refused when traced, before there is a backend"
)


def call(name, x, axes):
    return catalogue.FUNCTIONS[name](jaxcomm, x, axes, catalogue.fixed(4))


@pytest.mark.parametrize("name", catalogue.FUNCTIONS)
def test_an_unbound_axis_is_a_name_error(trace, name):
    with pytest.raises(NameError, match=r"unbound axis name: nowhere"):
        trace(lambda x: call(name, x, "nowhere"))
    with pytest.raises(NameError, match=r"unbound axis name: nowhere"):
        trace(lambda x: call(name, x, ("i", "nowhere")))
    with pytest.raises(NameError, match=r"unbound axis name: nowhere"):
        trace(lambda x: call(name, x, "nowhere"), check_vma=False)


@pytest.mark.parametrize("name", catalogue.FUNCTIONS)
def test_every_function_calls_itself_by_its_own_name(trace, name):
    with pytest.raises(NameError, match=rf"Call jaxcomm\.{name} inside"):
        trace(lambda x: call(name, x, "nowhere"))

    with pytest.raises(
        TypeError, match=rf"^{name} over \('i',\): every leaf of x must"
    ):
        trace(lambda x: call(name, (x, "text"), "i")[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lanes": 2},
            r"^init: lanes must be names, got 2\. Pass one for each lane, as ",
        ),
        ({"lanes": None}, r"^init: lanes must be names, got None\."),
        (
            {"policy": {"max_ctas": 8}},
            r"^init: policy must be a jaxcomm\.CommPolicy or None, got "
            r"\{'max_ctas': 8\}\. Pass its fields by name",
        ),
        # What is false is not the same as None.
        (
            {"policy": {}},
            r"^init: policy must be a jaxcomm\.CommPolicy or None, got \{",
        ),
    ],
)
def test_init_refuses_what_it_cannot_use(mesh_of, options, message):
    with pytest.raises(TypeError, match=message):
        jaxcomm.init(mesh_of((4,), ("i",)), **options)
    assert len(jaxcomm.communicators()) == 0


def test_init_makes_nothing_if_one_lane_is_no_name(mesh_of):
    with pytest.raises(ValueError, match="lane must be a non-empty string, got 3"):
        jaxcomm.init(mesh_of((4,), ("i",)), lanes=("first", 3))
    assert len(jaxcomm.communicators()) == 0


@pytest.mark.parametrize("name", catalogue.FUNCTIONS)
def test_outside_of_shard_map_the_error_says_where_to_call_it(name):
    with pytest.raises(NameError, match="shard_map"):
        call(name, jnp.ones(4), "i")
    with pytest.raises(NameError, match="shard_map"):
        jax.jit(lambda x: call(name, x, "i"))(jnp.ones(4))


@pytest.mark.parametrize(
    "name", ["all_gather", "ppermute", "psum", "pbroadcast", "pscan"]
)
def test_random_keys_are_refused_with_the_way_round(trace, name):
    keys = jax.random.split(jax.random.key(0), 4)
    with pytest.raises(TypeError, match=rf"{name} over .*jax\.random\.key_data\(x\)"):
        trace(lambda x: call(name, x, "i"), keys)
    with pytest.raises(TypeError, match=rf"{name} over .*jax\.random\.key_data\(x\)"):
        trace(lambda x: call(name, keys, "i"))


def test_key_data_travels(stacked, mesh_of):
    """What the message recommends works."""
    keys = jax.random.split(jax.random.key(0), 4)
    data = np.asarray(jax.random.key_data(keys))
    found = stacked(mesh_of((4,), ("i",)), lambda x: jaxcomm.ring_shift(x, "i"), data)
    moved = jax.random.wrap_key_data(found)
    expected = jax.random.normal(keys[3])
    assert jax.random.normal(moved[0]) == expected


def test_an_unknown_backend_names_those_there_are(trace):
    with pytest.raises(ValueError, match=r"backend 'gloo' is unknown; choose one of"):
        trace(lambda x: jaxcomm.psum(x, "i", backend="gloo")).lower()


@pytest.mark.parametrize("lane", [7, ""])
def test_a_lane_is_a_name(trace, lane):
    with pytest.raises((ValueError, TypeError), match="lane"):
        trace(lambda x: jaxcomm.psum(x, "i", lane=lane)).lower()


def test_the_same_axis_twice_is_refused(trace):
    with pytest.raises(ValueError, match=r"twice|duplicate|unique"):
        trace(lambda x: jaxcomm.psum(x, ("i", "i"))).lower()
