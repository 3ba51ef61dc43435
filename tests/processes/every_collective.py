"""Every collective with numpy's idea of it, for operands of shape (size, 2, ...)."""

import jaxcomm

# These number the devices in the mesh's order of axes, however the axes are named.
PERMUTES = ("ppermute", "ppermute_some", "pshuffle")
# These add or multiply: floats depend on the order, which is not that of the ranks.
SUMS = ("psum", "psum_scatter", "reduce")
PRODUCTS = ("pprod",)


def some(size):
    """The first rank only sends, the last only receives."""
    return [(0, size - 1)] + [(rank, rank - 1) for rank in range(2, size)]


def calls(x, axes, size, lane=None, backend=None):
    """Returns the results of all collectives, by name."""
    at = {"lane": lane, "backend": backend}
    last = size - 1
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    return {
        "all_gather": jaxcomm.all_gather(x, axes, axis=1, **at),
        "all_to_all": jaxcomm.all_to_all(x, axes, 0, 1, tiled=True, **at),
        "pswapaxes": jaxcomm.pswapaxes(x, axes, 0, **at),
        "ppermute": jaxcomm.ppermute(x, axes, ring, **at),
        "ppermute_some": jaxcomm.ppermute(x, axes, some(size), **at),
        "pshuffle": jaxcomm.pshuffle(x, axes, [last, *range(last)], **at),
        "ring_shift": jaxcomm.ring_shift(x, axes, -1, **at),
        "broadcast": jaxcomm.pbroadcast(x, axes, last, **at),
        "gather": jaxcomm.pgather(x, axes, last, axis=0, tiled=True, **at),
        "scatter": jaxcomm.pscatter(x, axes, 1, **at),
        "barrier": jaxcomm.pbarrier(x, axes, **at),
        "pmax": jaxcomm.pmax(x, axes, **at),
        "pmin": jaxcomm.pmin(x, axes, **at),
        "scan_max": jaxcomm.pscan(
            x, axes, op="max", exclusive=True, reverse=True, **at
        ),
        "psum": jaxcomm.psum(x, axes, **at),
        "psum_scatter": jaxcomm.psum_scatter(x, axes, **at),
        "reduce": jaxcomm.preduce(x, axes, last, **at),
        "scan": jaxcomm.pscan(x, axes, **at),
        "pprod": jaxcomm.pprod(x, axes, **at),
        "scan_prod": jaxcomm.pscan(x, axes, op="prod", exclusive=True, **at),
    }


def models(model, size):
    """Returns the numpy model of each, by name."""
    last = size - 1
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    back = [(rank, (rank - 1) % size) for rank in range(size)]
    return {
        "all_gather": model.all_gather(1),
        "all_to_all": model.all_to_all(0, 1, tiled=True),
        "pswapaxes": model.all_to_all(0, 0),
        "ppermute": model.permute(ring),
        "ppermute_some": model.permute(some(size)),
        "pshuffle": model.permute(ring),
        "ring_shift": model.permute(back),
        "broadcast": model.broadcast(last),
        "gather": model.only_on(last, model.all_gather(0, tiled=True)),
        "scatter": model.scatter(1),
        "barrier": lambda group: group,
        "pmax": model.all_reduce("max"),
        "pmin": model.all_reduce("min"),
        "scan_max": model.scan("max", exclusive=True, reverse=True),
        "psum": model.all_reduce("sum"),
        "psum_scatter": model.reduce_scatter(),
        "reduce": model.only_on(last, model.all_reduce("sum")),
        "scan": model.scan(),
        "pprod": model.all_reduce("prod"),
        "scan_prod": model.scan("prod", exclusive=True),
    }
