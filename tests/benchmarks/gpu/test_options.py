import dataclasses

import pytest

from bench.gpu import options, sizes
from bench.gpu.parts import PARTS
from bench.options import UsageError


def parse(words):
    return options.parse(words.split())


def test_two_gpus_and_everything_unless_told_otherwise(tmp_path):
    asked = parse("")
    assert asked == options.Options(2, 1, False, tuple(PARTS))
    assert asked.sizes(sizes.TINY) == sizes.TINY
    # The usual tokens are rounded up for odd numbers of ranks.
    assert parse("--ranks 3").sizes(sizes.TINY).tokens == (66,)
    # On one GPU every rank is a process.
    assert parse("--one-gpu --ranks 3").processes == 3
    path = f"{tmp_path}/x.json"
    asked = parse(
        "--ranks 4 --processes=2 --only overlap,memory,overlap --tokens 32768,131072 "
        f"--json {path}"
    )
    expected = 4, 2, False, ("memory", "overlap"), (32768, 131072), path
    assert dataclasses.astuple(asked) == expected
    changed = asked.sizes(sizes.TINY)
    assert changed.tokens == (32768, 131072)
    assert changed.large == sizes.TINY.large


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--only lanes,nope", "no part 'nope'; choose from memory, collectives"),
        ("--ranks 1", "one rank has nobody to talk to"),
        ("--ranks 3 --processes 2", "3 ranks cannot be split evenly over 2"),
        ("--processes 0", "2 ranks cannot be split evenly over 0"),
        ("--ranks 4 --processes 2 --one-gpu", "2 processes were asked for 4 ranks"),
        ("--tokens 64,66", "66 cannot be dealt to 2 ranks; give a multiple of 4"),
        ("--json /no/such/folder/x", "cannot write '/no/such/folder/x'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_advice(words, advice):
    with pytest.raises(UsageError, match=advice):
        parse(words)
