"""Values that are refused while tracing, and what the refusal says."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="refused when traced, before there is a backend"
)

BAD_VALUES = {
    "an empty group": (
        lambda x: jaxcomm.psum(x, "i", axis_index_groups=[[], [0, 1, 2, 3]]),
        r"axis_index_groups must not have an empty group, got \(\(\), \(0, 1, 2, 3\)\)",
    ),
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
        lambda x: jaxcomm.all_gather(x, "i", to="unreduced"),
        r"to='unreduced'; choose one of 'varying', 'invarying' and 'reduced'",
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
        lambda x: jaxcomm.pbroadcast(x, "i", 4),
        r"broadcast over \('i',\): source 4 is not among the 4 indices 0 \.\. 3",
    ),
    "pbroadcast from a negative source": (
        lambda x: jaxcomm.pbroadcast(x, "i", -1),
        r"pbroadcast over \('i',\): source -1 is not among",
    ),
    "reduce to a missing root": (
        lambda x: jaxcomm.preduce(x, "i", 9),
        r"preduce over \('i',\): root 9 is not among",
    ),
    "gather to a missing root": (
        lambda x: jaxcomm.pgather(x, "i", 4),
        r"pgather over \('i',\): root 4 is not among",
    ),
    "gather to the root along a missing axis": (
        lambda x: jaxcomm.pgather(x, "i", axis=3),
        r"pgather: axis 3 is out of range",
    ),
    "scatter from a missing root": (
        lambda x: jaxcomm.pscatter(x[:4], "i", 4),
        r"pscatter over \('i',\): root 4 is not among",
    ),
    "scatter from the root what does not divide": (
        lambda x: jaxcomm.pscatter(x, "i", tiled=True),
        r"pscatter: dimension 0 of x has size 6, which is not divisible by the 4",
    ),
    "scatter from the root what is not of the axis size": (
        lambda x: jaxcomm.pscatter(x, "i"),
        r"pscatter: dimension 0 of x has size 6, which must be the 4 devices",
    ),
    "scan with an unknown operation": (
        lambda x: jaxcomm.pscan(x, "i", op="xor"),
        r"pscan: op must be one of \('sum', 'prod', 'max', 'min'\), got 'xor'",
    ),
    "reduce with an unknown operation": (
        lambda x: jaxcomm.preduce(x, "i", op="mean"),
        r"preduce: op must be one of \('sum', 'prod', 'max', 'min'\), got 'mean'",
    ),
    "scan with several operations": (
        lambda x: jaxcomm.pscan(x, "i", op=["sum"]),
        r"pscan: op must be one of .* got \['sum'\]",
    ),
    "reduce with several operations": (
        lambda x: jaxcomm.preduce(x, "i", op=["sum"]),
        r"preduce: op must be one of .* got \['sum'\]",
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


@pytest.mark.parametrize("to", ["invarying", "reduced"])
def test_a_gather_within_groups_is_not_equal_on_all(trace, to):
    """NotImplementedError, as from jax.lax."""
    groups = [[0, 1], [2, 3]]
    for twin in (jaxcomm, jax.lax):
        with pytest.raises(NotImplementedError) as caught:
            trace(
                lambda x, t=twin: t.all_gather(x, "i", to=to, axis_index_groups=groups)
            )
        if twin is jaxcomm:
            assert "the result differs between groups" in str(caught.value)
