"""One color for one variant, in every picture."""

from bench import collectives
from bench.rows import GLOO, LAX, MPI4JAX, OURS

_COLORS = {
    OURS: "tab:blue",
    LAX: "tab:orange",
    GLOO: "tab:orange",
    MPI4JAX: "tab:purple",
    collectives.FLOOR_VARIANT: "tab:gray",
}
LOST = "tab:red"


def of(variant: str) -> str:
    """Return the color of a variant."""
    return _COLORS.get(variant, "tab:green")
