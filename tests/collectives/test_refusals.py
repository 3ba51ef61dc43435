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
PAIRS = f"perm must be pairs (source, destination) of integers {KNOWN}got "
SOURCES = f"perm must be a sequence of integers {KNOWN}the source of each index along "
SOURCES += "the axis, got "
GROUPS = f"axis_index_groups must be sequences of integers {KNOWN}such as "
GROUPS += "[[0, 1], [2, 3]], got "
LEAF = "every leaf of x must be an array, got "
INTEGER = f"must be an integer {KNOWN}got "


def ragged(x, output, lengths, dtype=jnp.int32):
    indices = [jnp.zeros(length, dtype) for length in lengths]
    return jc.ragged_all_to_all(x, output, *indices, axis_name="i")


def over_axes(name, axes, **options):
    return lambda x: getattr(jc, name)(x, axes, **options)


# A function, its options or the whole call, and what the error says behind its name, or
# behind nothing.
BAD_TYPES = [
    ("psum", lambda x: jc.psum((x, "text"), "i")[0], f"{LEAF}str"),
    ("all_gather", lambda x: jc.all_gather((x, object()), "i")[0], f"{LEAF}object"),
    ("ppermute", lambda x: jc.ppermute((x, np.array([None])), "i", [(0, 1)])[0],
     f"{LEAF}ndarray of dtype object"),
    ("psum", lambda x: jc.psum(np.array(["text"]), "i"), "ndarray of dtype <U4"),
    ("pmean", lambda x: jc.pmean(np.zeros(2, np.longdouble), "i"), "of dtype float128"),
    ("ragged_all_to_all", lambda x: ragged(x, x, [4] * 4, jnp.float32),
     "input_offsets must be integers, got float32"),
    ("ragged_all_to_all", lambda x: ragged(x, x.astype(jnp.bfloat16), [4] * 4),
     "operand has dtype float32, output bfloat16; they must be equal"),
    ("pbarrier", {"step": 0.5}, "step must be an integer, got float32"),
    ("pswapaxes", {"axis": 0.5}, f"axis {INTEGER}0.5"),
    ("all_gather", {"axis": 0.5}, f"axis {INTEGER}0.5"),
    ("pbroadcast", {"source": 1.5}, f"source {INTEGER}1.5"),
    ("pbroadcast", {"source": True}, f"source {INTEGER}True"),
    ("pbroadcast", lambda x: jc.pbroadcast(x, "i", x[0].astype(int)), "source must be"),
    ("psum", over_axes("psum", ("i", True)),
     "an axis is a name or an integer, got ('i', True)"),
    ("psum", over_axes("psum", [["i"]]),
     "^axis_name=[['i']] is neither a name nor a tuple of names"),
    ("all_gather", lambda x: jc.all_gather("i", x), "^axis_name="),
    ("ppermute", {"perm": [1, 2, 3, 0]},
     f"{PAIRS}[1, 2, 3, 0]. The source of each index by itself is jaxcomm.pshuffle"),
    ("ppermute", {"perm": {0: 1}}, f"{PAIRS}{{0: 1}}. Pass list(perm.items())."),
    ("ppermute", lambda x: jc.ppermute(x, "i", x.astype(int).reshape(3, 2)), PAIRS),
    ("ppermute", lambda x: jc.ppermute(x, "i", [(0, x[0].astype(int))]), PAIRS),
    ("pshuffle", {"perm": 4},
     f"{SOURCES}4. Pairs (source, destination) go to jaxcomm.ppermute."),
    ("pshuffle", lambda x: jc.pshuffle(x, "i", x[:4].astype(int)), SOURCES),
    ("pscan", lambda x: jc.pscan(x.astype(jnp.float8_e8m0fnu), "i", exclusive=True),
     "x has dtype float8_e8m0fnu, which has no zero"),
    # XLA cannot hand them to a custom call, and on CPU hardly computes with them.
    *(("all_gather", lambda x, name=name: jc.all_gather(x.astype(name), "i"), name)
      for name in ("float6_e2m3fn", "float6_e3m2fn")),
    ("ring_shift", lambda x: jc.ring_shift(x, "i", x[0].astype(int)), "shift must be"),
    ("ring_shift_start", {"shift": "1"}, f"shift {INTEGER}'1'"),
    ("all_gather", {"axis_index_groups": ["01", "23"]}, GROUPS),
    ("psum", lambda x: jc.psum(1, "i", axis_index_groups=[0, 1, 2, 3]), GROUPS),
    *(
        (name, {flag: value}, f"{flag} must be True or False, {KNOWN}got")
        for name, flag, value in (
            *(("all_gather", "tiled", v) for v in ("False", None, 2, 1.0, np.ones(1))),
            ("all_gather_start", "tiled", None), ("psum_scatter", "tiled", 2),
            ("pgather", "tiled", None), ("pscan", "exclusive", 2),
            ("pscan", "reverse", "False"),
        )
    ),
    *((name, {"reproducible": 1}, "reproducible must be True, False or None, known")
      for name in ("psum", "pmean", "psum_scatter_start")),
]  # fmt: skip

NOT_DIVISIBLE = "dimension 0 of x has size 6, not divisible by the 4 devices"
NOT_OF_SIZE = "dimension 0 of x has size 6, but axes ('i',) have 4 devices"
UNIQUE = "sources and destinations must be unique"
OPS = "op must be one of ('sum', 'prod', 'max', 'min'), got "
COVER = "^axis_index_groups must cover all indices exactly once"
ONE_SIZE = "^axis_index_groups must all be of one size here"
HALVES = [[0, 1], [2, 3]]
BAD_VALUES = [
    ("psum", {"axis_index_groups": [[], [0, 1, 2, 3]]},
     "^axis_index_groups must not have an empty group, got ((), (0, 1, 2, 3))"),
    ("psum", {"axis_index_groups": [[0, 1], [2]]}, COVER),
    ("pmax", {"axis_index_groups": [[0, 1], [1, 2, 3]]}, COVER),
    ("all_gather", {"axis_index_groups": [[0], [1, 2, 3]]}, ONE_SIZE),
    ("psum_scatter", {"axis_index_groups": [[0], [1, 2, 3]], "tiled": True}, ONE_SIZE),
    ("pmean", {"axis_index_groups": [[0], [1, 2, 3]]}, ONE_SIZE),
    ("psum", over_axes("psum", ("i", 0), axis_index_groups=HALVES), "axis names alone"),
    ("pmean", over_axes("pmean", ("i", 0), axis_index_groups=HALVES), "names alone"),
    ("psum", over_axes("psum", ("i", 0), reproducible=True),
     "reproducible sums are over axis names, got axes ('i', 0). Call jaxcomm.local"),
    ("all_gather", {"axis": 2}, "axis 2 is out of range for an array of 2 dimensions"),
    ("all_gather", {"to": "unreduced"},
     "to='unreduced'; choose one of 'varying', 'invarying' and 'reduced'"),
    ("psum_scatter", {"tiled": True}, f"{NOT_DIVISIBLE} of axes ('i',)"),
    ("psum_scatter", {}, NOT_OF_SIZE),
    ("psum_scatter", {"scatter_dimension": -2}, "scatter_dimension -2 is out of range"),
    ("all_to_all", lambda x: jc.all_to_all(x, "i", 0, 0, tiled=True), NOT_DIVISIBLE),
    ("all_to_all", lambda x: jc.all_to_all(x, "i", 0, 0), NOT_OF_SIZE),
    ("all_to_all", lambda x: jc.all_to_all(x, "i", 1, 0), "split_axis 1 is out"),
    ("all_to_all", lambda x: jc.all_to_all(x[:4], "i", 0, 5), "concat_axis 5 is out"),
    ("pswapaxes", {"axis": 0}, "pass tiled=True to all_to_all"),
    ("pswapaxes", {"axis": 5}, "axis 5 is out of range"),
    ("ppermute", {"perm": [(0, 1), (2, 1)]}, UNIQUE),
    ("ppermute", {"perm": [(0, 1), (0, 2)]}, UNIQUE),
    ("ppermute", {"perm": [(0, 4)]}, "destination 4 is not among the 4 indices 0 .. 3"),
    ("ppermute", {"perm": [(-1, 0)]}, "source -1 is not among the 4 indices"),
    ("ppermute", {"perm": [(0, 1, 2)]}, f"{PAIRS}[(0, 1, 2)]"),
    ("pshuffle", {"perm": [0, 1, 1, 2]}, "perm must be a permutation of indices"),
    ("pshuffle", {"perm": [1, 0]}, "perm must be a permutation of all 4"),
    ("pbroadcast", {"source": 4}, "source 4 is not among the 4 indices 0 .. 3"),
    ("preduce", {"root": 9}, "root 9 is not among"),
    ("pgather", {"root": 4}, "root 4 is not among"),
    ("pgather", {"axis": 3}, "axis 3 is out of range"),
    ("pscatter", lambda x: jc.pscatter(x[:4], "i", 4), "root 4 is not among"),
    ("pscatter", {"tiled": True}, "has size 6, not divisible by the 4"),
    ("pscatter", {}, "dimension 0 of x has size 6, but axes"),
    ("pbarrier", lambda x: jc.pbarrier(x, "i", step=x[:2].astype(int)),
     "step must be a scalar, got shape (2,)"),
    ("pscan", {"op": "xor"}, f"{OPS}'xor'"),
    ("pscan", {"op": ["sum"]}, f"{OPS}['sum']"),
    ("ragged_all_to_all", lambda x: ragged(x, x, (4, 4, 4, 8)),
     "offsets and sizes must be of one shape (K,)"),
    ("ragged_all_to_all", lambda x: ragged(x, x, [6] * 4),
     "6 slices are not divisible by the 4 devices"),
    ("ragged_all_to_all", lambda x: ragged(x, x.reshape(3, 2), [4] * 4),
     "operand and output must agree in all dimensions but the first"),
    # Also over no other device, where no backend is looked for.
    ("psum", over_axes("psum", (), backend="gloo"), "^backend 'gloo' is unknown"),
    ("psum", {"backend": ["host"]}, "^backend ['host'] is unknown; choose one of"),
    ("psum", {"lane": 7}, "lane"),
    ("psum", {"lane": ""}, "lane"),
    ("psum", over_axes("psum", ("i", "i")), "^axes ('i', 'i') name an axis twice"),
]  # fmt: skip
CASES = [(TypeError, *case) for case in BAD_TYPES]
CASES += [(ValueError, *case) for case in BAD_VALUES]


@pytest.mark.parametrize(("error", "name", "given", "message"), CASES)
def test_a_bad_argument_is_refused_while_tracing(trace, error, name, given, message):
    call = over_axes(name, "i", **given) if isinstance(given, dict) else given
    says = re.escape(message.removeprefix("^"))
    start = "^" if message.startswith("^") else rf"(?s)^{name}\b.*"
    with pytest.raises(error, match=start + says):
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
    with pytest.raises(TypeError, match=f"^{name} .*{LEAF}"):
        trace(lambda x: call((x, "text"))[0])
    if name not in ("ragged_all_to_all", "pcast"):
        keys = jax.random.split(jax.random.key(0), 4)
        with pytest.raises(TypeError, match=rf"{name} .*jax\.random\.key_data\(x\)"):
            trace(lambda x: call(keys))


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
