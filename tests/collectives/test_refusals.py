"""Calls that are refused while tracing, and what the refusal says."""

import re

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc

pytestmark = pytest.mark.host_only(
    reason="refused when traced, before there is a backend"
)

KNOWN = "known when the program is traced, "
PAIRS = r"^ppermute over \('i',\): perm must be pairs \(source, destination\) of "
PAIRS += f"integers {KNOWN}got "
SOURCES = r"^pshuffle over \('i',\): perm must be a sequence of integers "
SOURCES += f"{KNOWN}the source of each index along the axis, got "
GROUPS = r" over \('i',\): axis_index_groups must be sequences of integers "
GROUPS += rf"{KNOWN}such as \[\[0, 1\], \[2, 3\]\], got "
LEAF = r" over \('i',\): every leaf of x must be an array, got "


def ragged(x, output, lengths, dtype=jnp.int32):
    indices = [jnp.zeros(length, dtype) for length in lengths]
    return jc.ragged_all_to_all(x, output, *indices, axis_name="i")


BAD_TYPES = [
    (lambda x: jc.psum((x, "text"), "i")[0], f"^psum{LEAF}str"),
    (lambda x: x + jc.psum("hello", "i"), f"^psum{LEAF}str"),
    (lambda x: jc.all_gather((x, object()), "i")[0], f"^all_gather{LEAF}object"),
    (lambda x: jc.ppermute((x, np.array([None])), "i", [(0, 1)])[0],
     f"^ppermute{LEAF}ndarray of dtype object"),
    (lambda x: jc.psum(np.array(["text"]), "i"), f"^psum{LEAF}ndarray of dtype <U4"),
    (lambda x: jc.pmean(np.zeros(2, np.longdouble), "i"),
     f"^pmean{LEAF}ndarray of dtype float128"),
    (lambda x: ragged(x, x, [4] * 4, jnp.float32),
     "ragged_all_to_all: input_offsets must be integers, got float32"),
    (lambda x: ragged(x, x.astype(jnp.bfloat16), [4] * 4),
     "operand has dtype float32, output bfloat16; they must be equal"),
    (lambda x: jc.pswapaxes(x, "i", 0.5),
     f"^pswapaxes: axis must be an integer {KNOWN}got 0.5"),
    (lambda x: jc.all_gather(x, "i", axis=0.5),
     f"^all_gather: axis must be an integer {KNOWN}got 0.5"),
    (lambda x: jc.pbroadcast(x, "i", 1.5),
     rf"^pbroadcast over \('i',\): source must be an integer {KNOWN}got 1.5"),
    (lambda x: jc.pbroadcast(x, "i", x[0].astype(int)),
     rf"^pbroadcast over \('i',\): source must be an integer {KNOWN}got .*int32"),
    (lambda x: jc.pbroadcast(x, "i", True),
     r"^pbroadcast over \('i',\): source must be an integer .* got True"),
    (lambda x: jc.psum(x, ("i", True)),
     r"^psum: an axis is a name or an integer, got \('i', True\)"),
    (lambda x: jc.ppermute(x, "i", 3), f"{PAIRS}3"),
    (lambda x: jc.ppermute(x, "i", [1, 2, 3, 0]),
     PAIRS + r"\[1, 2, 3, 0\]. The source of each index by itself is jaxcomm.pshuffle"),
    (lambda x: jc.ppermute(x, "i", {0: 1}),
     PAIRS + r"\{0: 1\}\. Pass list\(perm\.items\(\)\)\."),
    (lambda x: jc.ppermute(x, "i", x.astype(int).reshape(3, 2)),
     rf"{PAIRS}.*int32\[3,2\]"),
    (lambda x: jc.ppermute(x, "i", [(0, x[0].astype(int))]), PAIRS),
    (lambda x: jc.ppermute(x, "i", [(0, 1.5)]), PAIRS + r"\[\(0, 1.5\)\]"),
    (lambda x: jc.ppermute_start(x, "i", 3).done(),
     r"^ppermute_start over \('i',\): perm must be pairs .* got 3"),
    (lambda x: jc.pshuffle(x, "i", 4),
     SOURCES + r"4\. Pairs \(source, destination\) go to jaxcomm\.ppermute\."),
    (lambda x: jc.pshuffle(x, "i", None), rf"{SOURCES}None\."),
    (lambda x: jc.pshuffle(x, "i", [(0, 1)]), SOURCES + r"\[\(0, 1\)\]\. Pairs"),
    (lambda x: jc.pshuffle(x, "i", x[:4].astype(int)), rf"{SOURCES}.*int32\[4\]"),
    (lambda x: jc.pscan(x.astype(jnp.float8_e8m0fnu), "i", exclusive=True),
     r"^pscan over \('i',\): x has dtype float8_e8m0fnu, which has no zero"),
    (lambda x: jc.ring_shift(x, "i", x[0].astype(int)),
     rf"^ring_shift over \('i',\): shift must be an integer {KNOWN}got .*int32"),
    (lambda x: jc.ring_shift(x, "i", None),
     rf"^ring_shift over \('i',\): shift must be an integer {KNOWN}got None"),
    (lambda x: jc.ring_shift(x, "i", True),
     r"^ring_shift over \('i',\): shift must be an integer .* got True"),
    (lambda x: jc.ring_shift_start(x, "i", "1").done(),
     r"^ring_shift_start over \('i',\): shift must be an integer .* got '1'"),
    (lambda x: jc.psum(x, "i", axis_index_groups="abcd"), f"^psum{GROUPS}'abcd'"),
    (lambda x: jc.pmean(x, "i", axis_index_groups="abcd"), f"^pmean{GROUPS}"),
    (lambda x: jc.all_gather(x, "i", axis_index_groups=["01", "23"]),
     f"^all_gather{GROUPS}"),
    (lambda x: x + jc.psum(1, "i", axis_index_groups=[0, 1, 2, 3]), f"^psum{GROUPS}"),
]  # fmt: skip

NOT_DIVISIBLE = "dimension 0 of x has size 6, not divisible by the 4 devices"
NOT_OF_SIZE = "dimension 0 of x has size 6, but axes"
OPS = r"op must be one of \('sum', 'prod', 'max', 'min'\), got "
BAD_VALUES = [
    (lambda x: jc.psum(x, "i", axis_index_groups=[[], [0, 1, 2, 3]]),
     r"axis_index_groups must not have an empty group, got \(\(\), \(0, 1, 2, 3\)\)"),
    (lambda x: jc.psum(x, "i", axis_index_groups=[[0, 1], [2]]),
     "axis_index_groups must cover all indices exactly once"),
    (lambda x: jc.pmax(x, "i", axis_index_groups=[[0, 1], [1, 2, 3]]),
     "axis_index_groups must cover all indices exactly once"),
    (lambda x: jc.all_gather(x, "i", axis_index_groups=[[0], [1, 2, 3]]),
     "axis_index_groups must all be of one size here"),
    (lambda x: jc.psum_scatter(x, "i", axis_index_groups=[[0], [1, 2, 3]], tiled=True),
     "axis_index_groups must all be of one size here"),
    (lambda x: jc.psum(x, ("i", 0), axis_index_groups=[[0, 1], [2, 3]]),
     "^psum: axis_index_groups go with axis names alone"),
    (lambda x: jc.pmean(x, ("i", 0), axis_index_groups=[[0, 1], [2, 3]]),
     "^pmean: axis_index_groups go with axis names alone"),
    (lambda x: jc.all_gather(x, "i", axis=2),
     "all_gather: axis 2 is out of range for an array of 2 dimensions"),
    (lambda x: jc.all_gather(x, "i", axis=1, tiled=True),
     "all_gather: axis 1 is out of range for an array of 1 dimensions"),
    (lambda x: jc.all_gather(x, "i", to="unreduced"),
     "to='unreduced'; choose one of 'varying', 'invarying' and 'reduced'"),
    (lambda x: jc.psum_scatter(x, "i", tiled=True),
     rf"psum_scatter: {NOT_DIVISIBLE} of axes \('i',\)"),
    (lambda x: jc.psum_scatter(x, "i"),
     rf"psum_scatter: {NOT_OF_SIZE} \('i',\) have 4 devices"),
    (lambda x: jc.psum_scatter(x, "i", scatter_dimension=-2),
     "psum_scatter: scatter_dimension -2 is out of range"),
    (lambda x: jc.all_to_all(x, "i", 0, 0, tiled=True), f"all_to_all: {NOT_DIVISIBLE}"),
    (lambda x: jc.all_to_all(x, "i", 0, 0), f"all_to_all: {NOT_OF_SIZE}"),
    (lambda x: jc.all_to_all(x, "i", 1, 0), "all_to_all: split_axis 1 is out of range"),
    (lambda x: jc.all_to_all(x[:4], "i", 0, 5),
     "all_to_all: concat_axis 5 is out of range"),
    (lambda x: jc.pswapaxes(x, "i", 0),
     f"pswapaxes: {NOT_OF_SIZE}.*pass tiled=True to all_to_all"),
    (lambda x: jc.pswapaxes(x, "i", 5), "^pswapaxes: axis 5 is out of range"),
    (lambda x: jc.ppermute(x, "i", [(0, 1), (2, 1)]),
     r"ppermute over \('i',\): sources and destinations must be unique"),
    (lambda x: jc.ppermute(x, "i", [(0, 1), (0, 2)]),
     r"ppermute over \('i',\): sources and destinations must be unique"),
    (lambda x: jc.ppermute(x, "i", [(0, 4)]),
     r"ppermute over \('i',\): destination 4 is not among the 4 indices 0 \.\. 3"),
    (lambda x: jc.ppermute(x, "i", [(-1, 0)]),
     r"ppermute over \('i',\): source -1 is not among the 4 indices"),
    (lambda x: jc.ppermute(x, "i", [(0, 1, 2)]), rf"{PAIRS}\[\(0, 1, 2\)\]"),
    (lambda x: jc.pshuffle(x, "i", [0, 1, 1, 2]),
     "pshuffle: perm must be a permutation of indices"),
    (lambda x: jc.pshuffle(x, "i", [1, 0]),
     r"pshuffle over \('i',\): perm must be a permutation of all 4"),
    (lambda x: jc.pbroadcast(x, "i", 4),
     r"pbroadcast over \('i',\): source 4 is not among the 4 indices 0 \.\. 3"),
    (lambda x: jc.pbroadcast(x, "i", -1),
     r"pbroadcast over \('i',\): source -1 is not among"),
    (lambda x: jc.preduce(x, "i", 9), r"preduce over \('i',\): root 9 is not among"),
    (lambda x: jc.pgather(x, "i", 4), r"pgather over \('i',\): root 4 is not among"),
    (lambda x: jc.pgather(x, "i", axis=3), "pgather: axis 3 is out of range"),
    (lambda x: jc.pscatter(x[:4], "i", 4),
     r"pscatter over \('i',\): root 4 is not among"),
    (lambda x: jc.pscatter(x, "i", tiled=True),
     "pscatter: dimension 0 of x has size 6, which is not divisible by the 4"),
    (lambda x: jc.pscatter(x, "i"),
     "pscatter: dimension 0 of x has size 6, which must be the 4 devices"),
    (lambda x: jc.pscan(x, "i", op="xor"), f"pscan: {OPS}'xor'"),
    (lambda x: jc.preduce(x, "i", op="mean"), f"preduce: {OPS}'mean'"),
    (lambda x: jc.pscan(x, "i", op=["sum"]), rf"pscan: {OPS}\['sum'\]"),
    (lambda x: ragged(x, x, (4, 4, 4, 8)),
     r"ragged_all_to_all: offsets and sizes must be of one shape \(K,\).*recv_sizes"),
    (lambda x: ragged(x, x, [6] * 4),
     "ragged_all_to_all: 6 slices are not divisible by the 4 devices"),
    (lambda x: ragged(x, x.reshape(3, 2), [4] * 4),
     "operand and output must agree in all dimensions but the first"),
    (lambda x: jc.psum(x, "i", backend="gloo"),
     "backend 'gloo' is unknown; choose one of"),
    (lambda x: jc.psum(x, "i", lane=7), "lane"),
    (lambda x: jc.psum(x, "i", lane=""), "lane"),
    (lambda x: jc.psum(x, ("i", "i")), "twice|duplicate|unique"),
]  # fmt: skip
CASES = [(TypeError, *case) for case in BAD_TYPES]
CASES += [(ValueError, *case) for case in BAD_VALUES]


@pytest.mark.parametrize(
    ("error", "call", "message"), CASES, ids=[case[-1] for case in CASES]
)
def test_a_bad_argument_is_refused_while_tracing(trace, error, call, message):
    with pytest.raises(error, match=message):
        trace(call).lower()


@pytest.mark.parametrize("name", catalogue.FUNCTIONS)
def test_every_function_calls_itself_by_its_own_name(trace, name):
    def call(x, axes="i"):
        return catalogue.FUNCTIONS[name](jc, x, axes, catalogue.fixed(4))

    unbound = rf"(?s)unbound axis name: nowhere.*Call jaxcomm\.{name} inside"
    for axes, check_vma in (("nowhere", True), (("i", "nowhere"), False)):
        with pytest.raises(NameError, match=unbound):
            trace(lambda x, a=axes: call(x, a), check_vma=check_vma)
    with pytest.raises(NameError, match="shard_map"):
        call(jnp.ones(4))
    with pytest.raises(TypeError, match=f"^{name}{LEAF}"):
        trace(lambda x: call((x, "text"))[0])
    if name not in ("ragged_all_to_all", "pcast"):
        keys = jax.random.split(jax.random.key(0), 4)
        with pytest.raises(TypeError, match=rf"{name} .*jax\.random\.key_data\(x\)"):
            trace(lambda x: call(keys))


FLAGS = {
    "all_gather over ('i',): tiled": lambda x, f: jc.all_gather(x, "i", tiled=f),
    "all_gather_start over ('i',): tiled": lambda x, f: jc.all_gather_start(
        x, "i", tiled=f
    ).done(),
    "psum_scatter over ('i',): tiled": lambda x, f: jc.psum_scatter(x, "i", tiled=f),
    "all_to_all over ('i',): tiled": lambda x, f: jc.all_to_all(x, "i", 0, 0, tiled=f),
    "pgather over ('i',): tiled": lambda x, f: jc.pgather(x, "i", tiled=f),
    "pscan over ('i',): exclusive": lambda x, f: jc.pscan(x, "i", exclusive=f),
    "pscan over ('i',): reverse": lambda x, f: jc.pscan(x, "i", reverse=f),
}


@pytest.mark.parametrize("what", FLAGS)
def test_a_flag_is_true_or_false(trace, what):
    for flag in ("False", None, 2, 1.0, jnp.ones(1)):
        with pytest.raises(
            TypeError, match=re.escape(f"{what} must be True or False, {KNOWN}got")
        ):
            trace(lambda x, flag=flag: FLAGS[what](x, flag))


def test_numbers_and_pairs_of_numpy_s_and_iterators_will_do(trace):
    for flag in (np.True_, 1, np.False_, 0):
        trace(lambda x, flag=flag: jc.all_gather(x, "i", tiled=flag))
    pairs = np.array([(0, 1), (1, 0)])
    trace(lambda x: jc.ppermute(x, "i", pairs))
    trace(lambda x: jc.ppermute(x, "i", zip([0, 1], [1, 0], strict=True)))
    trace(lambda x: jc.pshuffle(x, "i", np.arange(4)))
    trace(lambda x: jc.ring_shift(x, "i", np.int8(-1)))
    trace(lambda x: jc.psum(x, "i", axis_index_groups=np.arange(4).reshape(2, 2)))


@pytest.mark.parametrize("to", ["invarying", "reduced"])
def test_a_gather_within_groups_is_not_equal_on_all(trace, to):
    """NotImplementedError, as from jax.lax."""
    groups = [[0, 1], [2, 3]]
    for twin, says in ((jc, "the result differs between groups"), (jax.lax, ".")):
        with pytest.raises(NotImplementedError, match=says):
            trace(
                lambda x, t=twin: t.all_gather(x, "i", to=to, axis_index_groups=groups)
            )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lanes": 2}, TypeError, r"^init: lanes must be names, got 2\. Pass one for"),
        ({"lanes": None}, TypeError, r"^init: lanes must be names, got None\."),
        # What is false is not the same as None.
        ({"policy": {}}, TypeError,
         r"^init: policy must be a jaxcomm\.CommPolicy or None, got \{"),
        ({"policy": {"max_ctas": 8}}, TypeError,
         r"CommPolicy or None, got \{'max_ctas': 8\}\. Pass its fields by name"),
        ({"lanes": ("first", 3)}, ValueError,
         "lane must be a non-empty string, got 3"),
    ],
)  # fmt: skip
def test_init_that_is_refused_makes_nothing(mesh, options, error, message):
    with pytest.raises(error, match=message):
        jc.init(mesh, **options)
    assert len(jc.communicators()) == 0


def test_key_data_travels(stacked, mesh):
    """What is recommended for random keys works."""
    keys = jax.random.split(jax.random.key(0), 4)
    data = np.asarray(jax.random.key_data(keys))
    found = stacked(mesh, lambda x: jc.ring_shift(x, "i"), data)
    np.testing.assert_array_equal(found[0], data[3])
