"""Communication for JAX that its user can see, choose and trust.

Collectives with the names, arguments and results of ``jax.lax``, and ring attention,
over communicators that can be listed, counted and closed. They work in ``jax.jit``
and ``jax.shard_map``, with gradients. See the README for the two-minute tour.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from jaxcomm import _built as _built
from jaxcomm import attention as attention
from jaxcomm.attention.dot_product_attention import (
    dot_product_attention as dot_product_attention,
)
from jaxcomm.attention.layout import Layout as Layout
from jaxcomm.attention.ring_attention import ring_attention as ring_attention
from jaxcomm.collectives.all_gather import all_gather as all_gather
from jaxcomm.collectives.all_reduce import pmax as pmax
from jaxcomm.collectives.all_reduce import pmean as pmean
from jaxcomm.collectives.all_reduce import pmin as pmin
from jaxcomm.collectives.all_reduce import pprod as pprod
from jaxcomm.collectives.all_reduce import psum as psum
from jaxcomm.collectives.all_to_all import all_to_all as all_to_all
from jaxcomm.collectives.all_to_all import pswapaxes as pswapaxes
from jaxcomm.collectives.barrier import barrier as barrier
from jaxcomm.collectives.broadcast import broadcast as broadcast
from jaxcomm.collectives.broadcast import pbroadcast as pbroadcast
from jaxcomm.collectives.gather import gather as gather
from jaxcomm.collectives.permute import ppermute as ppermute
from jaxcomm.collectives.permute import pshuffle as pshuffle
from jaxcomm.collectives.permute import ring_shift as ring_shift
from jaxcomm.collectives.pvary import pvary as pvary
from jaxcomm.collectives.ragged_all_to_all import ragged_all_to_all as ragged_all_to_all
from jaxcomm.collectives.reduce import reduce as reduce
from jaxcomm.collectives.reduce_scatter import psum_scatter as psum_scatter
from jaxcomm.collectives.scan import scan as scan
from jaxcomm.collectives.scatter import scatter as scatter
from jaxcomm.collectives.split_phase import all_gather_done as all_gather_done
from jaxcomm.collectives.split_phase import all_gather_start as all_gather_start
from jaxcomm.collectives.split_phase import all_to_all_done as all_to_all_done
from jaxcomm.collectives.split_phase import all_to_all_start as all_to_all_start
from jaxcomm.collectives.split_phase import ppermute_done as ppermute_done
from jaxcomm.collectives.split_phase import ppermute_start as ppermute_start
from jaxcomm.collectives.split_phase import psum_done as psum_done
from jaxcomm.collectives.split_phase import psum_scatter_done as psum_scatter_done
from jaxcomm.collectives.split_phase import psum_scatter_start as psum_scatter_start
from jaxcomm.collectives.split_phase import psum_start as psum_start
from jaxcomm.collectives.split_phase import ring_shift_done as ring_shift_done
from jaxcomm.collectives.split_phase import ring_shift_start as ring_shift_start
from jaxcomm.communicator import cpu_threads as _cpu_threads
from jaxcomm.communicator.backends.nccl.policy import CommPolicy as CommPolicy
from jaxcomm.communicator.cache import Communicators as Communicators
from jaxcomm.communicator.cache import communicators as communicators
from jaxcomm.communicator.cache import counters as counters
from jaxcomm.communicator.cache import finalize as finalize
from jaxcomm.communicator.cache import init as init
from jaxcomm.communicator.cache import memory_report as memory_report
from jaxcomm.communicator.communicator import Communicator as Communicator
from jaxcomm.communicator.symmetric_pool import SymmetricPool as SymmetricPool
from jaxcomm.diagnostics.flight_record import FlightRecord as FlightRecord
from jaxcomm.diagnostics.flight_record import flight_record as flight_record
from jaxcomm.errors import CommunicatorError as CommunicatorError

# Before anything makes JAX's CPU client.
_cpu_threads.prepare()

try:
    __version__ = _version("jaxcomm")
except _PackageNotFoundError:  # run from the source tree
    __version__ = "0+unknown"
