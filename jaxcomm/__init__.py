"""Communication for JAX that its user can see, choose and trust.

Collectives with the names, arguments and results of ``jax.lax``, and ring attention,
over communicators that can be listed, counted and closed. They work in ``jax.jit``
and ``jax.shard_map``, with gradients. See the README for the two-minute tour.
"""

# Before the extension: where that came first, ml_dtypes crashed (Ubuntu 24.04).
import jax as _jax  # noqa: F401

from jaxcomm import _built as _built
from jaxcomm import attention, checksums, renamed
from jaxcomm.attention.dot_product_attention import dot_product_attention
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.ring_attention import ring_attention
from jaxcomm.collectives import transposes as _transposes  # noqa: F401 -- registers
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.collectives.all_reduce import pmax, pmean, pmin, pprod, psum
from jaxcomm.collectives.all_to_all import all_to_all, pswapaxes
from jaxcomm.collectives.barrier import pbarrier
from jaxcomm.collectives.grow import grow
from jaxcomm.collectives.pcast import pcast
from jaxcomm.collectives.permute import ppermute, pshuffle, ring_shift
from jaxcomm.collectives.ragged_all_to_all import ragged_all_to_all
from jaxcomm.collectives.reduce_scatter import psum_scatter
from jaxcomm.collectives.rooted import pbroadcast, pgather, preduce, pscatter
from jaxcomm.collectives.scan import pscan
from jaxcomm.collectives.split_phase import (
    all_gather_start,
    all_to_all_start,
    ppermute_start,
    psum_scatter_start,
    psum_start,
    ring_shift_start,
)
from jaxcomm.communicator import cpu_threads as _cpu_threads
from jaxcomm.communicator import interrupts as _interrupts
from jaxcomm.communicator import shutdown as _shutdown
from jaxcomm.communicator.cache import communicators, finalize
from jaxcomm.communicator.communicator import Communicator
from jaxcomm.communicator.init import init
from jaxcomm.communicator.memory import memory_report
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.raise_if_failed import raise_if_failed
from jaxcomm.communicator.survivors import mesh_of_survivors, shrink
from jaxcomm.communicator.symmetric_pool import SymmetricPool
from jaxcomm.diagnostics.compiled import collectives_of
from jaxcomm.diagnostics.flight_record import flight_record
from jaxcomm.errors import CommunicatorError
from jaxcomm.machine import Machine
from jaxcomm.planning.plan import plan
from jaxcomm.primitives.call import using
from jaxcomm.primitives.split_phase import Handle
from jaxcomm.primitives.tree import local_sum

__all__ = [
    "CommPolicy",
    "Communicator",
    "CommunicatorError",
    "Handle",
    "Layout",
    "Machine",
    "SymmetricPool",
    "Tokens",
    "all_gather",
    "all_gather_start",
    "all_to_all",
    "all_to_all_start",
    "attention",
    "checksums",
    "collectives_of",
    "communicators",
    "dot_product_attention",
    "finalize",
    "flight_record",
    "grow",
    "init",
    "local_sum",
    "memory_report",
    "mesh_of_survivors",
    "pbarrier",
    "pbroadcast",
    "pcast",
    "pgather",
    "plan",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "ppermute_start",
    "pprod",
    "preduce",
    "pscan",
    "pscatter",
    "pshuffle",
    "psum",
    "psum_scatter",
    "psum_scatter_start",
    "psum_start",
    "pswapaxes",
    "ragged_all_to_all",
    "raise_if_failed",
    "ring_attention",
    "ring_shift",
    "ring_shift_start",
    "shrink",
    "using",
]

# Before anything makes JAX's CPU client.
_cpu_threads.prepare()
_shutdown.prepare()
_interrupts.prepare()

__version__ = _built.VERSION
__getattr__ = renamed.looked_up("jaxcomm")


def __dir__() -> list[str]:
    """Show the public names alone."""
    return [*__all__, "__version__"]
