"""The collectives of jax.lax, as they are when jaxcomm is imported.

A program may put ours in their places, as in ``jax.lax.psum = jaxcomm.psum``. Looked up
later, they would be ours too, and call themselves.
"""

from jax.lax import all_gather as all_gather
from jax.lax import all_to_all as all_to_all
from jax.lax import pcast as pcast
from jax.lax import pmax as pmax
from jax.lax import pmean as pmean
from jax.lax import pmin as pmin
from jax.lax import ppermute as ppermute
from jax.lax import psum as psum
from jax.lax import psum_scatter as psum_scatter
