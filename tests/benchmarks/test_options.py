import pytest

from bench import options, plan
from bench.options import UsageError


def read(words):
    return options.read(words.split())


def test_without_flags_each_suite_has_its_own_devices():
    asked = read("all")
    assert {suite: asked.devices_of(suite) for suite in asked.suites} == {
        "collectives": (2, 4, 8), "chain": (2, 8), "scan": (2, 8), "attention": (8,),
        "masks": (8,), "memory": (2, 4, 8), "processes": (2,),
    }  # fmt: skip
    assert asked.most_devices == 8


def test_flags_may_come_before_and_after_subcommands_in_any_order():
    asked = read("--devices 4,2 collectives --ops=psum,pmax,psum --quick")
    assert asked.devices == (4, 2)
    assert asked.ops == ("psum", "pmax")
    assert asked.quick
    assert read("scan chain").suites == ("chain", "scan")
    assert read("processes -n 2,8").devices_of("processes") == (2, 8)
    assert read("processes --processes=3").devices_of("processes") == (3,)
    assert read("all -n 4").devices_of("chain") == (2, 8)


def test_sizes_have_units_and_repeats_are_exact():
    asked = options.read(("collectives", "--sizes", "256,4k,64KiB,1 MiB,1GB,8b"))
    assert asked.sizes == (256, 4096, 65536, 1 << 20, 1 << 30, 8)
    effort = plan.effort(read("chain --repeats 7"))
    assert (effort.rounds, effort.fewest_rounds) == (7, 7)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "no subcommand was given; choose one of collectives, chain"),
        ("nope", "subcommand 'nope' is unknown; choose one of collectives"),
        ("chain all", "all goes with no other subcommand"),
        ("chain --devices 1", "--devices: '1' is not a number of devices"),
        ("collectives --sizes 0", "--sizes: '0' is not a positive number"),
        ("collectives --ops nope", "--ops: 'nope' is unknown; choose from psum"),
        ("chain --ops psum", "--ops goes with collectives or processes, not with chai"),
        ("scan --sequence 64", "--sequence goes with attention or masks, not with sca"),
        ("attention --sequence 100", "cannot be split evenly over 8 devices"),
        ("masks --sequence 96", "by masks; give a multiple of 64"),
        ("chain --bogus", "unrecognized arguments: --bogus"),
        ("chain --json /no/such/folder/x.json", "No such file or directory"),
        ("chain --plot /", "--plot: cannot write '/': Is a directory"),
        ("processes -n 1", "'1' is not a number of processes; give 2 to 64"),
    ],
)
def test_a_bad_command_line_is_answered_in_one_line(words, text):
    with pytest.raises(UsageError) as raised:
        read(words)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
