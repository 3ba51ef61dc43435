"""Values that are refused while tracing, and what the refusal says."""

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
