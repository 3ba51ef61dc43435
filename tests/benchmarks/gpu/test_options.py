import shlex

import pytest

from bench.gpu import options, sizes
from bench.gpu.parts import PARTS
from bench.options import UsageError


def test_two_gpus_and_everything_unless_told_otherwise():
    asked = options.parse([])
    assert asked == options.Options(2, 1, False, tuple(PARTS))
    assert asked.sizes(sizes.TINY) == sizes.TINY


def test_all_flags_are_read(tmp_path):
    words = shlex.split(
        "--ranks 4 --processes=2 --only overlap,memory,overlap --tokens 32768,131072 "
        f"--json {tmp_path}/x.json"
    )
    asked = options.parse(words)
    assert asked == options.Options(
        ranks=4,
        processes=2,
        one_gpu=False,
        only=("memory", "overlap"),
        tokens=(32768, 131072),
        json=f"{tmp_path}/x.json",
    )
    changed = asked.sizes(sizes.TINY)
    assert changed.tokens == (32768, 131072)
    assert changed.large == sizes.TINY.large


def test_the_usual_tokens_are_rounded_up_for_odd_numbers_of_ranks():
    assert options.parse(["--ranks", "3"]).sizes(sizes.TINY).tokens == (66,)


def test_on_one_gpu_every_rank_is_a_process():
    assert options.parse(["--one-gpu", "--ranks", "3"]).processes == 3


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
        options.parse(words.split())


@pytest.mark.parametrize("words", ["--ranks x", "--tokens 1,y", "--rank 2"])
def test_what_is_no_number_or_no_flag_ends_with_2(words, capsys):
    with pytest.raises(SystemExit) as raised:
        options.parse(words.split())
    assert raised.value.code == 2
    assert "usage: python -m bench gpu" in capsys.readouterr().err
