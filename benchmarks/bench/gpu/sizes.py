"""How much the parts of ``bench gpu`` do."""

import dataclasses

from bench.targets import KIB, MIB


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that fill a GPU, unless said otherwise.

    Attributes:
      dtypes: of the checks.
      small, large: bytes of each rank's operand, where latency and where bandwidth is
        measured.
      operands: of collectives, from the one to the other.
      chained: of sums that are made in a row, each of the one before.
      sent, matrix: bytes to send, and rows of the matrices to multiply beside that.
      heads: query heads, key and value heads, and their size.
      latent: query heads, key heads, and the sizes of keys and of values, which differ.
      states: heads of recurrent layers, and their size.
      tokens: of whole sequences.
      exchanges: in a row, each of what the one before gave: a model's layers wait so.
      layers: of attention in one program, as a model has them.
      model: layers, width, query and key heads of a model, and tokens of a sequence.
      lengths, step: how many lengths of a sequence, and tokens from one to the next.
      steps: gradients of one length in a row.
      soak, payloads: operations, and bytes of each rank's operand in them.
      in_a_row: broadcasts in one program.
      steady: calls of each collective.
      rounds, calls: of each comparison, and calls in a round.
    """

    dtypes: tuple[str, ...] = (
        "float32", "bfloat16", "float16", "int8", "uint8", "int16", "uint16", "int32",
        "uint32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e3m4",
        "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz",
        "float64", "int64", "uint64", "complex128",
    )  # fmt: skip
    small: int = KIB
    large: int = 256 * MIB
    operands: tuple[int, ...] = (KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)
    chained: tuple[int, ...] = (256, MIB)
    sent: int = 128 * MIB
    matrix: int = 6144
    heads: tuple[int, int, int] = (32, 8, 128)
    latent: tuple[int, int, int, int] = (16, 16, 192, 128)
    states: tuple[int, int] = (64, 128)
    tokens: tuple[int, ...] = (32768,)
    exchanges: int = 8
    layers: int = 8
    model: tuple[int, int, int, int, int] = (4, 2048, 16, 4, 65536)
    lengths: int = 20
    step: int = 1024
    steps: int = 50
    soak: int = 2000
    payloads: tuple[int, ...] = (256, 64 * KIB, 4 * MIB)
    in_a_row: int = 1000
    steady: int = 1000
    rounds: int = 9
    calls: int = 30

    def up_to(self, most: int) -> tuple[int, ...]:
        """Returns the lengths of sequences that are at most so long, or the shortest.

        >>> Sizes(tokens=(8192, 1 << 20)).up_to(32768)
        (8192,)
        """
        return tuple(n for n in self.tokens if n <= most) or (min(self.tokens),)


def length(tokens: int) -> str:
    """Returns how a row names a sequence of so many tokens.

    >>> length(32768), length(1 << 20)
    ('32k', '1M')
    """
    if tokens >= 1 << 20 and tokens % (1 << 20) == 0:
        return f"{tokens >> 20}M"
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


# Up to so many tokens one kernel attends to a whole sequence on one GPU. It takes a GPU
# of 80 GB a minute, and most of its memory, to do so forward and backward for 1M. A
# kernel's rate is the same from here on, so its time is scaled.
MOST_ALONE = 1 << 17
# Sequences from the shortest to the longest: with --thorough.
THOROUGH = 8192, 32768, 131072, 524288, 1048576


def calls_in_a_round(tokens: int) -> int:
    """Returns how often to attend: as layers follow one another, but not for minutes.

    The first waits for the host.
    """
    return 10 if tokens <= 1 << 16 else 3


# That all of it works, on the CPU devices of a stand-in for NCCL.
TINY = Sizes(
    dtypes=("bfloat16", "int8"),
    large=4 * KIB,
    operands=(KIB, 4 * KIB),
    chained=(256,),
    sent=4 * KIB,
    matrix=8,
    heads=(2, 1, 8),
    latent=(2, 2, 16, 8),
    states=(2, 8),
    tokens=(64,),
    exchanges=2,
    layers=2,
    model=(2, 16, 2, 1, 64),
    lengths=3,
    step=16,
    steps=3,
    soak=160,
    payloads=(256,),
    in_a_row=100,
    steady=5,
    rounds=2,
    calls=2,
)
