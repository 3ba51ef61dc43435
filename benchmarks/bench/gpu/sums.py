"""Small sums, each of the one before: what one costs inside a program."""

from bench.gpu.timer import Timer

LENGTH = 50


def chain(timer: Timer, module, **at):
    """Returns a program of ``LENGTH`` dependent sums.

    Args:
      timer: makes it.
      module: whose ``psum``: ``jaxcomm`` or ``jax.lax``.
      **at: its keyword arguments.
    """

    def sums(x):
        for _ in range(LENGTH):
            x = module.psum(x, "i", **at) * 0.5
        return x

    return timer.program(sums)
