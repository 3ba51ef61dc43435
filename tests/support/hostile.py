"""Inputs that nobody writes on purpose, for what reads lines and files from outside.

>>> hostile.refused_cleanly(parse, [b"ended 1 137"], ValueError, hostile.count(config))

A parser passes if it takes or refuses each input. To refuse is to raise an exception
that is documented, with a text that a terminal can show. Whatever else it raises is a
failure, and so is a gigabyte of memory.
"""

import collections
import contextlib
import copy
import json
import os
import random
import resource

IN_TEST = 2_000
THOROUGH = 100_000
# Of what a parser says: it may quote the input, but not hand all of it on.
_LONGEST_TEXT = 1_000
_MEMORY_BYTES = 1 << 30

_ODD = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**9, 10**30, 10**4000,
    0.5, 1e308, -1e308, float("nan"), float("inf"), "", "a", "0", "-1", "9" * 50, " ",
    "\x1b[2J", "\u202e", "\x00", "\ud800", "<b>", "a" * 5_000, [], {}, [[]], [None],
    [0] * 50, ["x"], [1.5], {"a": 1}, {"": []},
)  # fmt: skip
_BYTES = (
    b"[" * 5_000, b'{"a":' * 3_000, b"9" * 6_000, b"-1", b"1e999", b"NaN", b"null",
    b"\xff\xfe", b"\x1b[2J", b"\x00", b"\n" * 5, b" ", b'"', b"{}", b"\xe2\x80\xae",
    b"\\ud800", "\u0663".encode(), b"a" * 70_000,
)  # fmt: skip


def count(config):
    """Return how many inputs of a kind to try, by pytest's options."""
    return THOROUGH if config.getoption("--thorough") else IN_TEST


def refused_cleanly(parse, samples, refusals, count, seed=0):
    """Give a parser random and mutated inputs, and fail if one is not refused cleanly.

    Args:
      parse: takes an input of the type of the samples. It should also use what it
        parsed, as the product does: print it, look things up. An assertion of its own
        fails the test like any other exception.
      samples: valid inputs, bytes or text. Samples that are JSON are mutated as such
        too.
      refusals: the exception, or a tuple of those, that the parser documents.
      count: how many random and how many mutated inputs.
      seed: another one gives other inputs.

    Returns:
      How many inputs were ``"taken"`` and ``"refused"``.

    Raises:
      AssertionError: naming the input, and what came of it.
    """
    made_of = [each.encode() if isinstance(each, str) else each for each in samples]
    is_text = isinstance(samples[0], str)
    outcomes = collections.Counter()
    for each in samples:
        parse(each)
    with _little_memory():
        for number in range(count):
            rng = random.Random(f"{seed} {number}")
            for kind in (_random, _mutated):
                given = kind(rng, rng.choice(made_of))
                given = given.decode("utf-8", "replace") if is_text else given
                which = f"{kind.__name__.lstrip('_')} input {number} of seed {seed}"
                outcomes[_outcome(parse, given, refusals, which)] += 1
    assert outcomes["refused"], "nothing was refused: the parser looks at nothing"
    return outcomes


def is_plain(text):
    """Say whether a text shows what it is: no control or escape, nothing reversed."""
    return all(each.isprintable() or each == "\n" for each in text)


def _outcome(parse, given, refusals, which):
    try:
        parse(given)
        return "taken"
    except refusals as error:
        said, cause = str(error), error
        if is_plain(said) and len(said) <= _LONGEST_TEXT:
            return "refused"
        failure = "its text is long, or has characters that a terminal acts on"
    except Exception as error:
        said, cause, failure = str(error), error, "it is not documented"
    raise AssertionError(
        f"{which}: {type(cause).__name__}, but {failure}. It says {said[:300]!r} of "
        f"{len(given)} bytes or characters: {given[:3_000]!r}"
    ) from cause


def _random(rng, sample):
    """Return bytes of any kind, or the words of a sample in another order."""
    kind = rng.randrange(3)
    if kind == 0:
        return rng.randbytes(rng.choice((0, 1, 3, 20, 200)))
    if kind == 1:
        words = [*sample[:5_000].split(), *_BYTES[3:9]]
        return b" ".join(rng.choice(words) for _ in range(rng.randrange(12)))
    return _json(_value(rng, 3))


def _value(rng, depth):
    if not depth or rng.random() < 0.4:
        return rng.choice(_ODD)
    if rng.random() < 0.5:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    keys = "version", "process", "communicators", "", "a"
    return {rng.choice(keys): _value(rng, depth - 1) for _ in range(rng.randrange(4))}


def _mutated(rng, sample):
    if rng.random() < 0.7:
        with contextlib.suppress(ValueError):
            return _json(_mutated_document(rng, json.loads(sample)))
    return _mutated_bytes(rng, sample)


def _json(document):
    try:
        return json.dumps(document).encode()
    except ValueError:  # a number of more digits than Python writes
        return b"9" * 6_000


def _mutated_document(rng, document):
    root = [copy.deepcopy(document)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key = rng.choice(list(_places(root)))
        kind = rng.randrange(8)
        if kind < 5 or holder is root:
            holder[key] = copy.deepcopy(rng.choice(_ODD))
        elif kind == 5:
            del holder[key]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[rng.choice(["x", *holder])] = copy.deepcopy(rng.choice(_ODD))
    return root[0]


def _places(holder):
    """Yield where the values of a document are: what holds each, and by which key."""
    keys = holder if isinstance(holder, dict) else range(len(holder))
    for key in list(keys):
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])


def _mutated_bytes(rng, sample):
    found = bytearray(sample)
    for _ in range(rng.randrange(1, 6)):
        at, kind = rng.randrange(len(found) + 1), rng.randrange(10)
        if kind < 4 and at < len(found):
            found[at] = rng.randrange(256)
        elif kind < 6:
            del found[at : at + rng.randrange(1, 40)]
        elif kind < 8:
            found[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind < 9:
            found[at:at] = found[max(0, at - 50) : at] * rng.randrange(1, 4)
        else:
            found[at:at] = rng.choice(_BYTES)
    return bytes(found)


@contextlib.contextmanager
def _little_memory():
    """Have a parser that asks for a gigabyte raise MemoryError, and fail by it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
