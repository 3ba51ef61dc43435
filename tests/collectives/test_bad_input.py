"""What is refused while tracing, and what the refusal says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

X = np.zeros((4, 6), np.float32)  # (6,) on each of 4 devices

AXIS_CALLS = {
    "psum": lambda x, a: jaxcomm.psum(x, a),
    "pmean": lambda x, a: jaxcomm.pmean(x, a),
    "pmax": lambda x, a: jaxcomm.pmax(x, a),
    "pmin": lambda x, a: jaxcomm.pmin(x, a),
    "pprod": lambda x, a: jaxcomm.pprod(x, a),
    "all_gather": lambda x, a: jaxcomm.all_gather(x, a),
    "psum_scatter": lambda x, a: jaxcomm.psum_scatter(x, a, tiled=True),
    "all_to_all": lambda x, a: jaxcomm.all_to_all(x, a, 0, 0, tiled=True),
    "pswapaxes": lambda x, a: jaxcomm.pswapaxes(x, a, 0),
    "ppermute": lambda x, a: jaxcomm.ppermute(x, a, [(0, 1)]),
    "pshuffle": lambda x, a: jaxcomm.pshuffle(x, a, [0]),
    "ring_shift": lambda x, a: jaxcomm.ring_shift(x, a),
    "broadcast": lambda x, a: jaxcomm.broadcast(x, a),
    "pbroadcast": lambda x, a: jaxcomm.pbroadcast(x, a, 0),
    "reduce": lambda x, a: jaxcomm.reduce(x, a),
    "gather": lambda x, a: jaxcomm.gather(x, a),
    "scatter": lambda x, a: jaxcomm.scatter(x, a),
    "scan": lambda x, a: jaxcomm.scan(x, a),
    "barrier": lambda x, a: jaxcomm.barrier(x, a),
    "pvary": lambda x, a: jaxcomm.pvary(x, a),
}


@pytest.fixture
def trace(mesh_of):
    """Gives ``trace(call)``: traces it in shard_map on 4 devices along "i"."""
    mesh = mesh_of((4,), ("i",))

    def run(call, x=X, check_vma=True):
        program = jax.shard_map(
            lambda x: call(jax.tree.map(lambda leaf: leaf[0], x))[None],
            mesh=mesh,
            in_specs=jax.P("i"),
            out_specs=jax.P("i"),
            check_vma=check_vma,
        )
        return jax.jit(program).trace(x)

    return run


@pytest.mark.parametrize("name", AXIS_CALLS)
def test_an_unbound_axis_is_a_name_error(trace, name):
    with pytest.raises(NameError, match=r"unbound axis name: nowhere"):
        trace(lambda x: AXIS_CALLS[name](x, "nowhere"))
    with pytest.raises(NameError, match=r"unbound axis name: nowhere"):
        trace(lambda x: AXIS_CALLS[name](x, ("i", "nowhere")))
    with pytest.raises(NameError, match=r"unbound axis name: nowhere"):
        trace(lambda x: AXIS_CALLS[name](x, "nowhere"), check_vma=False)


@pytest.mark.parametrize("name", AXIS_CALLS)
def test_every_function_calls_itself_by_its_own_name(trace, name):
    with pytest.raises(NameError, match=rf"Call jaxcomm\.{name} inside"):
        trace(lambda x: AXIS_CALLS[name](x, "nowhere"))

    def call(x):
        if name == "pshuffle":  # the permutation above fits one device
            return jaxcomm.pshuffle((x, "text"), "i", [1, 2, 3, 0])[0]
        return AXIS_CALLS[name]((x, "text"), "i")[0]

    with pytest.raises(
        TypeError, match=rf"^{name} over \('i',\): every leaf of x must"
    ):
        trace(call)


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


@pytest.mark.parametrize("name", AXIS_CALLS)
def test_outside_of_shard_map_the_error_says_where_to_call_it(name):
    with pytest.raises(NameError, match="shard_map"):
        AXIS_CALLS[name](jnp.ones(4), "i")
    with pytest.raises(NameError, match="shard_map"):
        jax.jit(lambda x: AXIS_CALLS[name](x, "i"))(jnp.ones(4))


BAD_VALUES = {
    "gather past the last axis": (
        lambda x: jaxcomm.all_gather(x, "i", axis=2),
        r"all_gather: axis 2 is out of range for an array of 2 dimensions",
    ),
    "gather tiled past the last axis": (
        lambda x: jaxcomm.all_gather(x, "i", axis=1, tiled=True),
        r"all_gather: axis 1 is out of range for an array of 1 dimensions",
    ),
    "gather a scalar tiled": (
        lambda x: jaxcomm.all_gather(x[0], "i", tiled=True),
        r"all_gather: axis 0 is out of range for an array of 0 dimensions",
    ),
    "gather to an unknown type": (
        lambda x: jaxcomm.all_gather(x, "i", to="reduced"),
        r"to='reduced'; jaxcomm knows 'varying' and 'invarying'",
    ),
    "gather within groups as equal": (
        lambda x: jaxcomm.all_gather(
            x, "i", to="invarying", axis_index_groups=[[0, 1], [2, 3]]
        ),
        r"with axis_index_groups the result differs between groups",
    ),
    "scatter what does not divide": (
        lambda x: jaxcomm.psum_scatter(x, "i", tiled=True),
        r"psum_scatter: dimension 0 of x has size 6, not divisible by the 4 devices of "
        r"axes \('i',\)",
    ),
    "scatter what is not of the axis size": (
        lambda x: jaxcomm.psum_scatter(x, "i"),
        r"psum_scatter: dimension 0 of x has size 6, but axes \('i',\) have 4 devices",
    ),
    "scatter a missing dimension": (
        lambda x: jaxcomm.psum_scatter(x, "i", scatter_dimension=-2),
        r"psum_scatter: scatter_dimension -2 is out of range",
    ),
    "exchange what does not divide": (
        lambda x: jaxcomm.all_to_all(x, "i", 0, 0, tiled=True),
        r"all_to_all: dimension 0 of x has size 6, not divisible by the 4 devices",
    ),
    "exchange what is not of the axis size": (
        lambda x: jaxcomm.all_to_all(x, "i", 0, 0),
        r"all_to_all: dimension 0 of x has size 6, but axes \('i',\) have 4 devices",
    ),
    "exchange from a missing dimension": (
        lambda x: jaxcomm.all_to_all(x, "i", 1, 0),
        r"all_to_all: split_axis 1 is out of range",
    ),
    "exchange to a missing dimension": (
        lambda x: jaxcomm.all_to_all(x[:4], "i", 0, 5),
        r"all_to_all: concat_axis 5 is out of range",
    ),
    "swap what is not of the axis size": (
        lambda x: jaxcomm.pswapaxes(x, "i", 0),
        r"pswapaxes: dimension 0 of x has size 6, but .*pass tiled=True to all_to_all",
    ),
    "swap a missing dimension": (
        lambda x: jaxcomm.pswapaxes(x, "i", 5),
        r"^pswapaxes: axis 5 is out of range",
    ),
    "send from two to one": (
        lambda x: jaxcomm.ppermute(x, "i", [(0, 1), (2, 1)]),
        r"ppermute over \('i',\): sources and destinations must be unique",
    ),
    "send twice from one": (
        lambda x: jaxcomm.ppermute(x, "i", [(0, 1), (0, 2)]),
        r"ppermute over \('i',\): sources and destinations must be unique",
    ),
    "send to a missing index": (
        lambda x: jaxcomm.ppermute(x, "i", [(0, 4)]),
        r"ppermute over \('i',\): destination 4 is not among the 4 indices 0 \.\. 3",
    ),
    "send from a negative index": (
        lambda x: jaxcomm.ppermute(x, "i", [(-1, 0)]),
        r"ppermute over \('i',\): source -1 is not among the 4 indices",
    ),
    "shuffle with a repeated index": (
        lambda x: jaxcomm.pshuffle(x, "i", [0, 1, 1, 2]),
        r"pshuffle: perm must be a permutation of indices",
    ),
    "shuffle some of the devices": (
        lambda x: jaxcomm.pshuffle(x, "i", [1, 0]),
        r"pshuffle over \('i',\): perm must be a permutation of all 4",
    ),
    "shuffle more than the devices": (
        lambda x: jaxcomm.pshuffle(x, "i", [5, 4, 3, 2, 1, 0]),
        r"pshuffle",
    ),
    "broadcast from a missing root": (
        lambda x: jaxcomm.broadcast(x, "i", 4),
        r"broadcast over \('i',\): root 4 is not among the 4 indices 0 \.\. 3",
    ),
    "pbroadcast from a negative source": (
        lambda x: jaxcomm.pbroadcast(x, "i", -1),
        r"pbroadcast over \('i',\): source -1 is not among",
    ),
    "reduce to a missing root": (
        lambda x: jaxcomm.reduce(x, "i", 9),
        r"reduce over \('i',\): root 9 is not among",
    ),
    "gather to a missing root": (
        lambda x: jaxcomm.gather(x, "i", 4),
        r"gather over \('i',\): root 4 is not among",
    ),
    "gather to the root along a missing axis": (
        lambda x: jaxcomm.gather(x, "i", axis=3),
        r"gather: axis 3 is out of range",
    ),
    "scatter from a missing root": (
        lambda x: jaxcomm.scatter(x[:4], "i", 4),
        r"scatter over \('i',\): root 4 is not among",
    ),
    "scatter from the root what does not divide": (
        lambda x: jaxcomm.scatter(x, "i", tiled=True),
        r"scatter: dimension 0 of x has size 6, which is not divisible by the 4",
    ),
    "scatter from the root what is not of the axis size": (
        lambda x: jaxcomm.scatter(x, "i"),
        r"scatter: dimension 0 of x has size 6, which must be the 4 devices",
    ),
    "scan with an unknown operation": (
        lambda x: jaxcomm.scan(x, "i", op="xor"),
        r"scan: op must be one of \('sum', 'prod', 'max', 'min'\), got 'xor'",
    ),
    "reduce with an unknown operation": (
        lambda x: jaxcomm.reduce(x, "i", op="mean"),
        r"reduce: op must be one of \('sum', 'prod', 'max', 'min'\), got 'mean'",
    ),
    "scan with several operations": (
        lambda x: jaxcomm.scan(x, "i", op=["sum"]),
        r"scan: op must be one of .* got \['sum'\]",
    ),
    "reduce with several operations": (
        lambda x: jaxcomm.reduce(x, "i", op=["sum"]),
        r"reduce: op must be one of .* got \['sum'\]",
    ),
    "groups that leave out an index": (
        lambda x: jaxcomm.psum(x, "i", axis_index_groups=[[0, 1], [2]]),
        r"axis_index_groups must cover all indices exactly once",
    ),
    "groups that repeat an index": (
        lambda x: jaxcomm.pmax(x, "i", axis_index_groups=[[0, 1], [1, 2, 3]]),
        r"axis_index_groups must cover all indices exactly once",
    ),
    "gather within unequal groups": (
        lambda x: jaxcomm.all_gather(x, "i", axis_index_groups=[[0], [1, 2, 3]]),
        r"axis_index_groups must all be of one size here",
    ),
    "scatter within unequal groups": (
        lambda x: jaxcomm.psum_scatter(
            x, "i", axis_index_groups=[[0], [1, 2, 3]], tiled=True
        ),
        r"axis_index_groups must all be of one size here",
    ),
    "groups along dimensions": (
        lambda x: jaxcomm.psum(x, ("i", 0), axis_index_groups=[[0, 1], [2, 3]]),
        r"psum: axis_index_groups go with axis names alone",
    ),
    "a mean in groups along dimensions": (
        lambda x: jaxcomm.pmean(x, ("i", 0), axis_index_groups=[[0, 1], [2, 3]]),
        r"^pmean: axis_index_groups go with axis names alone",
    ),
    "send in triples": (
        lambda x: jaxcomm.ppermute(x, "i", [(0, 1, 2)]),
        r"ppermute over \('i',\): perm must be pairs \(source, destination\) of "
        r"integers known when the program is traced, got \[\(0, 1, 2\)\]",
    ),
    "ragged with unequal index lengths": (
        lambda x: jaxcomm.ragged_all_to_all(
            x, x, *(jnp.zeros(n, jnp.int32) for n in (4, 4, 4, 8)), axis_name="i"
        ),
        r"ragged_all_to_all: offsets and sizes must be of one shape \(K,\).*recv_sizes",
    ),
    "ragged with slices that do not divide": (
        lambda x: jaxcomm.ragged_all_to_all(
            x, x, *(jnp.zeros(6, jnp.int32) for _ in range(4)), axis_name="i"
        ),
        r"ragged_all_to_all: 6 slices are not divisible by the 4 devices",
    ),
    "ragged with rows of two shapes": (
        lambda x: jaxcomm.ragged_all_to_all(
            x,
            x.reshape(3, 2),
            *(jnp.zeros(4, jnp.int32) for _ in range(4)),
            axis_name="i",
        ),
        r"operand and output must agree in all dimensions but the first",
    ),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_is_refused_while_tracing(trace, case):
    call, message = BAD_VALUES[case]
    with pytest.raises(ValueError, match=message):
        trace(call)


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
        lambda x: jaxcomm.broadcast(x, "i", 1.5),
        r"^broadcast over \('i',\): root must be an integer known when the program is "
        r"traced, got 1.5",
    ),
    "a traced root": (
        lambda x: jaxcomm.broadcast(x, "i", x[0].astype(int)),
        r"^broadcast over \('i',\): root must be an integer known when",
    ),
    "a root that is true": (
        lambda x: jaxcomm.broadcast(x, "i", True),
        r"^broadcast over \('i',\): root must be an integer .* got True",
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
        lambda x: jaxcomm.ppermute_done(jaxcomm.ppermute_start(x, "i", 3)),
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
    "a shift that is traced": (
        lambda x: jaxcomm.ring_shift(x, "i", x[0].astype(int)),
        r"^ring_shift over \('i',\): shift must be an integer known when",
    ),
    "the shift of a first half": (
        lambda x: jaxcomm.ring_shift_done(jaxcomm.ring_shift_start(x, "i", "1")),
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


@pytest.mark.parametrize(
    "name", ["all_gather", "ppermute", "psum", "broadcast", "scan"]
)
def test_random_keys_are_refused_with_the_way_round(trace, name):
    keys = jax.random.split(jax.random.key(0), 4)
    with pytest.raises(TypeError, match=rf"{name} over .*jax\.random\.key_data\(x\)"):
        trace(lambda x: AXIS_CALLS[name](x, "i"), keys)


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


def test_equal_results_may_leave_unsplit_and_varying_ones_may_not(mesh_of):
    mesh = mesh_of((2, 2), ("a", "b"))

    def shape_of(call, out_specs):
        program = jax.shard_map(
            call, mesh=mesh, in_specs=jax.P("a", "b"), out_specs=out_specs
        )
        return jax.eval_shape(program, jax.ShapeDtypeStruct((4, 4), np.float32)).shape

    both = ("a", "b")
    for name in ("psum", "pmean", "pmax", "pmin", "pprod"):
        call = getattr(jaxcomm, name)
        assert shape_of(lambda x: call(x, both), jax.P()) == (2, 2)  # noqa: B023
        assert shape_of(lambda x: call(x, "a"), jax.P(None, "b")) == (2, 4)  # noqa: B023
        with pytest.raises(ValueError, match="out_specs"):
            shape_of(lambda x: call(x, "a"), jax.P())  # noqa: B023
    equal = lambda x: jaxcomm.all_gather(x, both, to="invarying")  # noqa: E731
    assert shape_of(equal, jax.P()) == (4, 2, 2)
    varying = {
        "all_gather": lambda x: jaxcomm.all_gather(x, both),
        "ppermute": lambda x: jaxcomm.ppermute(x, both, [(0, 1)]),
        "ring_shift": lambda x: jaxcomm.ring_shift(x, both),
        "psum_scatter": lambda x: jaxcomm.psum_scatter(x, "a"),
        "all_to_all": lambda x: jaxcomm.all_to_all(x, "a", 0, 0),
        "broadcast": lambda x: jaxcomm.broadcast(x, both),
        "reduce": lambda x: jaxcomm.reduce(x, both),
        "gather": lambda x: jaxcomm.gather(x, both),
        "scatter": lambda x: jaxcomm.scatter(x, "b"),
        "scan": lambda x: jaxcomm.scan(x, both),
        "barrier": lambda x: jaxcomm.barrier(x, both),
        "psum in groups": lambda x: jaxcomm.psum(
            x, both, axis_index_groups=[[0, 1], [2, 3]]
        ),
    }
    refusals = {}
    for name, call in varying.items():
        try:
            shape = shape_of(call, jax.P())
        except ValueError as error:
            refusals[name] = str(error)
        else:
            refusals[name] = f"let through with shape {shape}"
    assert {n: text for n, text in refusals.items() if "out_specs" not in text} == {}


def test_the_types_are_those_of_jax_lax(mesh_of):
    """Beside the values' own axes: an unvarying operand varies after all_gather."""
    mesh = mesh_of((2, 2), ("a", "b"))

    def types_of(lib):
        seen = {}

        def local(x, w):
            calls = {
                "psum": lib.psum(x, "a"),
                "pmax": lib.pmax(x, ("a", "b")),
                "all_gather": lib.all_gather(x, "b"),
                "psum_scatter": lib.psum_scatter(x, "a"),
                "all_to_all": lib.all_to_all(x, "a", 0, 0, tiled=True),
                "ppermute": lib.ppermute(x, "b", [(0, 1)]),
                "psum of equal values": lib.psum(w, "a"),
                "all_gather of equal values": lib.all_gather(w, "a"),
                "ppermute of equal values": lib.ppermute(w, "a", [(0, 1)]),
            }
            seen.update({name: jax.typeof(out) for name, out in calls.items()})
            return x

        program = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(jax.P("a", "b"), jax.P()),
            out_specs=jax.P("a", "b"),
        )
        struct = jax.ShapeDtypeStruct((4, 4), np.float32)
        jax.eval_shape(program, struct, struct)
        return {n: (t.shape, t.dtype, t.mat.varying) for n, t in seen.items()}

    assert types_of(jaxcomm) == types_of(jax.lax)
