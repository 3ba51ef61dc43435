import pytest

from bench import options, plan
from bench.options import UsageError


def read(*words):
    return options.read(words)


def test_without_flags_each_suite_has_its_own_devices():
    asked = read("all")
    assert asked.suites == (
        "collectives", "chain", "scan", "attention", "masks", "memory", "processes",
    )  # fmt: skip
    assert [asked.devices_of(suite) for suite in asked.suites] == [
        (2, 4, 8), (2, 8), (2, 8), (8,), (8,), (2, 4, 8), (2,),
    ]  # fmt: skip
    assert asked.most_devices == 8


def test_flags_may_come_before_and_after_the_subcommand():
    asked = read("--devices", "4,2", "collectives", "--ops=psum,pmax,psum", "--quick")
    assert asked.devices == (4, 2)
    assert asked.ops == ("psum", "pmax")
    assert asked.quick


def test_sizes_have_units():
    asked = read("collectives", "--sizes", "256,4k,64KiB,1 MiB,1GB,8b")
    assert asked.sizes == (256, 4096, 65536, 1 << 20, 1 << 30, 8)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "no subcommand was given; choose one of collectives, chain"),
        ((), "attention, masks, memory, processes, all or gpu"),
        (("--quick", "gpu"), "gpu comes before its flags: gpu --flag value"),
        (("nope",), "subcommand 'nope' is unknown; choose one of collectives"),
        (("chain", "all"), "all goes with no other subcommand"),
        (("chain", "scam"), "subcommand 'scam' is unknown"),
        (("chain", "--devices", "1"), "--devices: '1' is not a number of devices"),
        (("chain", "--devices", "2,x"), "--devices: 'x' is not a number of devices"),
        (("chain", "--devices", ""), "--devices: '' is not a number of devices"),
        (("chain", "--devices", "129"), "give 2 to 128"),
        (("collectives", "--sizes", "0"), "--sizes: '0' is not a positive number"),
        (("collectives", "--sizes", "-4"), "--sizes: '-4' is not a positive number"),
        (("collectives", "--sizes", "1.5k"), "'1.5k' is not a positive number"),
        (
            ("collectives", "--ops", "nope"),
            "--ops: 'nope' is unknown; choose from psum",
        ),
        (
            ("chain", "--ops", "psum"),
            "--ops goes with collectives or processes, not with chain",
        ),
        (
            ("scan", "--sequence", "64"),
            "--sequence goes with attention or masks, not with scan",
        ),
        (("attention", "--sequence", "0"), "'0' is not a positive number of tokens"),
        (("attention", "--sequence", "100"), "cannot be split evenly over 8 devices"),
        (("masks", "--sequence", "96"), "by masks; give a multiple of 64"),
        (("chain", "--repeats", "0"), "--repeats: '0' is not a positive number"),
        (("chain", "--repeats", "two"), "--repeats: 'two' is not a positive number"),
        (("chain", "--bogus"), "unrecognized arguments: --bogus"),
        (("chain", "--json"), "argument --json: expected one argument"),
        (("chain", "--json", "/no/such/folder/x.json"), "No such file or directory"),
        (("chain", "--plot", "/"), "--plot: cannot write '/': Is a directory"),
    ],
)
def test_a_bad_command_line_is_answered_in_one_line(words, text):
    with pytest.raises(UsageError) as raised:
        read(*words)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_trying_whether_a_file_can_be_written_leaves_no_trace(tmp_path):
    there = tmp_path / "there.json"
    there.write_text("old")
    read("chain", "--json", str(there), "--plot", str(tmp_path / "new.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]
    assert there.read_text() == "old"


def test_the_help_names_every_subcommand_and_flag():
    text = options.usage()
    for name in (
        *options.SUITES,
        "all",
        "gpu",
        "--devices",
        "--sizes",
        "--json",
        "--plot",
    ):
        assert f"  {name} " in text


def test_every_row_of_the_issue_is_planned():
    found = {
        (case.suite, case.name, case.devices, case.target.bound)
        for case in plan.cases(read("all"))
        if case.target
    }
    assert len({row for row in found if row[0] == "collectives"}) >= 3 * 7
    assert found >= {
        ("chain", "50 dependent psums", 2, 5),
        ("chain", "50 dependent psums", 8, 12),
        ("collectives", "all_gather", 2, 8),
        ("collectives", "all_to_all", 8, 2),
        ("collectives", "psum_bf16", 8, 1.5),
        ("scan", "20 x product of sum", 8, 1.05),
        ("scan", "20 x product beside sum", 2, 1.05),
        ("attention", "forward", 8, 0.5),
        ("attention", "forward + backward", 8, 0.4),
    }


def test_repeats_are_exact_when_given():
    effort = plan.effort(read("chain", "--repeats", "7"))
    assert (effort.rounds, effort.fewest_rounds) == (7, 7)


def test_several_subcommands_run_in_their_order():
    assert read("scan", "chain").suites == ("chain", "scan")
