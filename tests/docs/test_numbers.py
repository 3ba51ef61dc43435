"""Numbers on pages are those of the code, in Python and in C++."""

import re
from pathlib import Path

import pytest

from jaxcomm import CommPolicy, config
from jaxcomm.attention.kernels import cudnn, scores
from jaxcomm.attention.strategies import choice, loop, packing
from jaxcomm.communicator import policy, shutdown
from jaxcomm.launch.options import Options
from jaxcomm.planning import communicators
from jaxcomm.primitives import nccl_rewrites

ROOT = Path(__file__).parents[2]
NCCL = "ffi/backends/nccl/"


def constant(path, name):
    """Return what a ``constexpr`` of C++ is."""
    text = (ROOT / path).read_text()
    (found,) = re.findall(rf"constexpr .*\b{name} = (.*);", text)
    base, _, shift = found.partition(" << ")
    return int(re.split(r"\D+", base.rstrip(")}"))[-1]) << int(shift or 0)


def choice_of(name):
    return constant(f"{NCCL}plans/engine_choice.h", name)


ROW, COPY = choice_of("kLeastBytesOfRow"), choice_of("kLeastBytesOfCopy")
COPIED, MORE = choice_of("kLeastCopiedBytes"), choice_of("kLeastBytesOfMore")
MAPPED, MOST_MAPPED = choice_of("kLeastMappedBytes"), choice_of("kMostMappedBytes")
SLOT = constant(f"{NCCL}engines/mapped_copies.h", "kSlotBytes")
SLOTS = constant(f"{NCCL}engines/mapped_copies.h", "kSlots")
SPIN = constant("ffi/backends/host/local/local_wait.cc", "kSpin")
WINDOW = communicators._WINDOWS // 2


def mib(size):
    return f"{size >> 20} MiB"


SAID = {
    "attention": [
        f"A bias below {scores.LEAST_BIAS:,} hides its key",
        f"take at most 1/{1 / choice._SHARE:.0f} of a GPU's memory",
        f"{packing._MANY:,} pieces of documents on up to "
        f"{packing._MOST // packing._MANY} ranks, {packing._MOST:,} / ranks on more, "
        f"and {packing._MIDDLE} on a mesh",
        f"a causal window of {cudnn._LEAST_WINDOW:,} tokens or more",
    ],
    "communicators": [
        f"GPUs' copy engines move data from {mib(COPIED)} on",
        f"sends along pairs from {mib(MAPPED)} to {mib(MOST_MAPPED)}, and split-phase "
        f"sends from {mib(MORE)} on",
        f"A communicator takes {mib(SLOTS * SLOT)} of each GPU's",
        f"A communicator takes {mib(communicators._INBOX)} of each GPU's",
        f"send up to {mib(choice_of('kMostExchangedBytes'))} to each other rank",
        f"mapped, {mib(2 * WINDOW)} of each GPU's arena. This serves operands of up to "
        f"{mib(WINDOW)} a rank and results of up to "
        f"{mib(choice_of('kMostWindowsOfResult') * WINDOW)}",
        f"{mib(CommPolicy().arena_bytes)} unless set",
        f"`JAXCOMM_TIMEOUT` | {config.DEFAULT_TIMEOUT_SECONDS:g} |",
        f"`JAXCOMM_MAX_COMMUNICATORS` | {config.DEFAULT_MAX_COMMUNICATORS} |",
    ],
    "how-it-works": [
        f"in its handler for {SPIN} us at most",
        f"stages pieces of {mib(SLOT)}",
        f"up to {loop._UNROLLED_RANKS} ranks are no loop",
    ],
    "limits": [
        f"{mib(communicators._INBOX)} of each GPU for kernels, and {mib(SLOTS * SLOT)} "
        "for copies between processes",
        f"of no multiple of {nccl_rewrites._QUAD_BYTES} bytes, in more than "
        f"{nccl_rewrites._MOST_ARRAYS} arrays, or if a rank sends less than "
        f"{nccl_rewrites._LEAST_BYTES_OF_KERNEL >> 10} KiB",
        f"rows of {ROW} bytes or more if a rank sends {mib(COPIED)}, and {mib(COPY)} "
        "for each copy",
        f"up to {mib(nccl_rewrites._GATHERED_BYTES)} in a group",
        f"a bias below {scores.LEAST_BIAS:,}",
    ],
    "processes": [
        f"`--grace` seconds. The default is {Options.grace:g}.",
        f"for {shutdown._MOST_SECONDS_OF_PROGRESS:g} s at most, and for collectives "
        f"until none ends in {shutdown._MOST_SECONDS:g} s",
    ],
}


@pytest.mark.parametrize("page", SAID)
def test_a_page_says_what_the_code_does(page):
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    assert [said for said in SAID[page] if said not in text] == []


def test_what_python_repeats_of_the_extension_is_the_same():
    assert nccl_rewrites._LEAST_ROW_BYTES == ROW
    assert nccl_rewrites._LEAST_BYTES_OF_COPY == COPY
    assert nccl_rewrites._LEAST_STRIDED_BYTES == COPIED
    assert choice_of("kMostLineBytes") == nccl_rewrites._LEAST_BYTES_OF_KERNEL
    assert choice_of("kMostWorks") == nccl_rewrites._MOST_ARRAYS
    assert policy._INBOX_BYTES >= communicators._INBOX
    assert communicators._MAPPED == SLOTS * SLOT
    ranks = constant(f"{NCCL}engines/peer_memory.h", "kMostRanks")
    assert ranks == policy._MOST_MAPPED_RANKS
