"""What a kernel of one's own is: it computes a rank's queries over a block of keys."""

from jaxcomm.attention.kernels.kernel import Grads as Grads
from jaxcomm.attention.kernels.kernel import Hop as Hop
from jaxcomm.attention.kernels.kernel import Kernel as Kernel
from jaxcomm.attention.kernels.kernel import Saved as Saved
from jaxcomm.attention.kernels.selection import kernels_of as kernels_of
from jaxcomm.attention.mask import Coordinates as Coordinates
from jaxcomm.attention.mask import Mask as Mask
from jaxcomm.attention.pairs import Block as Block
from jaxcomm.attention.pairs import Pairs as Pairs

__all__ = [
    "Block",
    "Coordinates",
    "Grads",
    "Hop",
    "Kernel",
    "Mask",
    "Pairs",
    "Saved",
    "kernels_of",
]


def __dir__() -> list[str]:
    """Show the public names alone."""
    return __all__
