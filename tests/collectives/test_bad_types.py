"""Types that are refused while tracing, and what the refusal says."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="refused when traced, before there is a backend"
)

PAIRS = (
    r"^ppermute over \('i',\): perm must be pairs \(source, destination\) of integers "
    r"known when the program is traced, "
)
SOURCES = (
    r"^pshuffle over \('i',\): perm must be a sequence of integers known when the "
    r"program is traced, the source of each index along the axis, "
)
BAD_TYPES = {
    "a string": (
        lambda x: jaxcomm.psum((x, "text"), "i")[0],
        r"psum over \('i',\): every leaf of x must be an array, got str",
    ),
    "an object": (
        lambda x: jaxcomm.all_gather((x, object()), "i")[0],
        r"all_gather.*must be an array, got object",
    ),
    "an array of objects": (
        lambda x: jaxcomm.ppermute((x, np.array([None])), "i", [(0, 1)])[0],
        r"ppermute over \('i',\): every leaf of x must be an array, got ndarray of "
        r"dtype object",
    ),
    "an array of texts alone": (
        lambda x: jaxcomm.psum(np.array(["text"]), "i"),
        r"psum over \('i',\): every leaf of x must be an array, got ndarray of dtype <",
    ),
    "a dtype that JAX lacks": (
        lambda x: jaxcomm.pmean(np.zeros(2, np.longdouble), "i"),
        r"pmean over \('i',\): every leaf of x must be an array, got ndarray of "
        r"dtype float128",
    ),
    "ragged float offsets": (
        lambda x: jaxcomm.ragged_all_to_all(
            x, x, jnp.zeros(4), *(jnp.zeros(4, jnp.int32) for _ in range(3)),
            axis_name="i",
        ),
        r"ragged_all_to_all: input_offsets must be integers, got float32",
    ),
    "ragged operands of two dtypes": (
        lambda x: jaxcomm.ragged_all_to_all(
            x, x.astype(jnp.bfloat16), *(jnp.zeros(4, jnp.int32) for _ in range(4)),
            axis_name="i",
        ),
        r"operand has dtype float32, output bfloat16; they must be equal",
    ),
    "groups of a mean that are a string": (
        lambda x: jaxcomm.pmean(x, "i", axis_index_groups="abcd"),
        r"^pmean over \('i',\): axis_index_groups must be sequences",
    ),
    "an axis to swap between two": (
        lambda x: jaxcomm.pswapaxes(x, "i", 0.5),
        r"^pswapaxes: axis must be an integer known when",
    ),
    "a fractional source": (
        lambda x: jaxcomm.pbroadcast(x, "i", 1.5),
        r"^pbroadcast over \('i',\): source must be an integer known when",
    ),
    "a fractional root": (
        lambda x: jaxcomm.pbroadcast(x, "i", 1.5),
        r"^pbroadcast over \('i',\): source must be an integer known when the program "
        r"is traced, got 1.5",
    ),
    "a truth value for an axis": (
        lambda x: jaxcomm.psum(x, ("i", True)),
        r"^psum: an axis is a name or an integer, got \('i', True\)",
    ),
    "a traced root": (
        lambda x: jaxcomm.pbroadcast(x, "i", x[0].astype(int)),
        r"^pbroadcast over \('i',\): source must be an integer known when",
    ),
    "a root that is true": (
        lambda x: jaxcomm.pbroadcast(x, "i", True),
        r"^pbroadcast over \('i',\): source must be an integer .* got True",
    ),
    "pairs that are a number": (
        lambda x: jaxcomm.ppermute(x, "i", 3),
        PAIRS + r"got 3",
    ),
    "pairs that are pshuffle's": (
        lambda x: jaxcomm.ppermute(x, "i", [1, 2, 3, 0]),
        PAIRS + r"got \[1, 2, 3, 0\]. The source of each index by itself is "
        r"jaxcomm.pshuffle's form\.",
    ),
    "pairs that are a dict": (
        lambda x: jaxcomm.ppermute(x, "i", {0: 1}),
        PAIRS + r"got \{0: 1\}\. Pass list\(perm\.items\(\)\)\.",
    ),
    "pairs that are traced": (
        lambda x: jaxcomm.ppermute(x, "i", x.astype(int).reshape(3, 2)),
        PAIRS + r"got .*int32\[3,2\]",
    ),
    "pairs of what is traced": (
        lambda x: jaxcomm.ppermute(x, "i", [(0, x[0].astype(int))]),
        PAIRS + r"got ",
    ),
    "pairs of halves": (
        lambda x: jaxcomm.ppermute(x, "i", [(0, 1.5)]),
        PAIRS + r"got \[\(0, 1.5\)\]",
    ),
    "pairs of the first half": (
        lambda x: jaxcomm.ppermute_start(x, "i", 3).done(),
        r"^ppermute_start over \('i',\): perm must be pairs .* got 3",
    ),
    "a shuffle that is a number": (
        lambda x: jaxcomm.pshuffle(x, "i", 4),
        SOURCES + r"got 4\. Pairs \(source, destination\) go to jaxcomm\.ppermute\.",
    ),
    "a shuffle that is none": (
        lambda x: jaxcomm.pshuffle(x, "i", None),
        SOURCES + r"got None\.",
    ),
    "a shuffle that is ppermute's": (
        lambda x: jaxcomm.pshuffle(x, "i", [(0, 1)]),
        SOURCES + r"got \[\(0, 1\)\]\. Pairs",
    ),
    "a shuffle that is traced": (
        lambda x: jaxcomm.pshuffle(x, "i", x[:4].astype(int)),
        SOURCES + r"got .*int32\[4\]",
    ),
    "an exclusive sum without a zero": (
        lambda x: jaxcomm.pscan(x.astype(jnp.float8_e8m0fnu), "i", exclusive=True),
        r"^pscan over \('i',\): x has dtype float8_e8m0fnu, which has no zero",
    ),
    "a shift that is traced": (
        lambda x: jaxcomm.ring_shift(x, "i", x[0].astype(int)),
        r"^ring_shift over \('i',\): shift must be an integer known when",
    ),
    "the shift of a first half": (
        lambda x: jaxcomm.ring_shift_start(x, "i", "1").done(),
        r"^ring_shift_start over \('i',\): shift must be an integer .* got '1'",
    ),
    "groups that are a string": (
        lambda x: jaxcomm.psum(x, "i", axis_index_groups="abcd"),
        r"^psum over \('i',\): axis_index_groups must be sequences of integers known "
        r"when the program is traced, such as \[\[0, 1\], \[2, 3\]\], got 'abcd'",
    ),
    "groups that are digits": (
        lambda x: jaxcomm.all_gather(x, "i", axis_index_groups=["01", "23"]),
        r"^all_gather over \('i',\): axis_index_groups must be sequences of integers",
    ),
    "groups that are flat": (
        lambda x: x + jaxcomm.psum(1, "i", axis_index_groups=[0, 1, 2, 3]),
        r"^psum over \('i',\): axis_index_groups must be sequences of integers",
    ),
    "an axis between two": (
        lambda x: jaxcomm.all_gather(x, "i", axis=0.5),
        r"^all_gather: axis must be an integer known when the program is traced, got "
        r"0.5",
    ),
    "a constant string": (
        lambda x: x + jaxcomm.psum("hello", "i"),
        r"^psum over \('i',\): every leaf of x must be an array, got str",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TYPES)
def test_a_bad_type_is_refused_while_tracing(trace, case):
    call, message = BAD_TYPES[case]
    with pytest.raises(TypeError, match=message):
        trace(call)


@pytest.mark.parametrize("flag", ["False", None, 2, 1.0, jnp.ones(1)])
def test_a_flag_is_true_or_false(trace, flag):
    calls = {
        "all_gather over ('i',): tiled": lambda x: jaxcomm.all_gather(
            x, "i", tiled=flag
        ),
        "all_gather_start over ('i',): tiled": lambda x: jaxcomm.all_gather_start(
            x, "i", tiled=flag
        ).done(),
        "psum_scatter over ('i',): tiled": lambda x: jaxcomm.psum_scatter(
            x, "i", tiled=flag
        ),
        "all_to_all over ('i',): tiled": lambda x: jaxcomm.all_to_all(
            x, "i", 0, 0, tiled=flag
        ),
        "pgather over ('i',): tiled": lambda x: jaxcomm.pgather(x, "i", tiled=flag),
        "pscan over ('i',): exclusive": lambda x: jaxcomm.pscan(x, "i", exclusive=flag),
        "pscan over ('i',): reverse": lambda x: jaxcomm.pscan(x, "i", reverse=flag),
    }
    for what, call in calls.items():
        message = f"{what} must be True or False, known when the program is traced, got"
        with pytest.raises(TypeError, match=re.escape(message)):
            trace(call)


def test_flags_of_numpy_s_and_one_and_zero_will_do(trace):
    for flag in (np.True_, 1, np.False_, 0):
        trace(lambda x, flag=flag: jaxcomm.all_gather(x, "i", tiled=flag))


@pytest.mark.parametrize("shift", ["1", None, 1.5, True])
def test_a_shift_is_an_integer(trace, shift):
    with pytest.raises(
        TypeError,
        match=r"^ring_shift over \('i',\): shift must be an integer known when the "
        rf"program is traced, got {shift!r}",
    ):
        trace(lambda x: jaxcomm.ring_shift(x, "i", shift))


def test_integers_and_pairs_of_numpy_s_and_iterators_will_do(trace):
    pairs = np.array([(0, 1), (1, 0)])
    trace(lambda x: jaxcomm.ppermute(x, "i", pairs))
    trace(lambda x: jaxcomm.ppermute(x, "i", zip([0, 1], [1, 0], strict=True)))
    trace(lambda x: jaxcomm.pshuffle(x, "i", np.arange(4)))
    trace(lambda x: jaxcomm.ring_shift(x, "i", np.int8(-1)))
    trace(lambda x: jaxcomm.psum(x, "i", axis_index_groups=np.arange(4).reshape(2, 2)))
