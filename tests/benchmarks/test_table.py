import pytest

from bench import units
from bench.targets import Target


@pytest.fixture
def lines(rows, printed):
    return printed(rows)


def test_every_suite_has_a_table_with_its_bounds(lines, the_line_with):
    titles = [line.strip() for line in lines]
    for suite in ("collectives", "chain", "attention", "memory"):
        assert suite in titles
    # Ours and the twin stand side by side.
    assert the_line_with(lines, "psum ", " 256 B") == (
        "psum 8 256 B 100 us 200 us 2.00 >= 1.1 pass 10 GB/s 100 %"
    )
    assert " >= 3 miss " in the_line_with(lines, "psum ", " 64 KiB")
    floor = the_line_with(lines, "dispatch floor")
    assert floor == "dispatch floor 8 256 B 10 us 100 GB/s 1000 %"
    # Growth is judged where it is ours.
    assert the_line_with(lines, " 1.0 %").endswith("< 5 % pass")
    assert the_line_with(lines, "ring over lax.ppermute", "10 %").endswith("10 %")
    assert "collectives: pmax, 8 devices failed. ValueError: no" in lines


def test_a_bound_says_what_is_good_enough():
    for target, text, good, bad in (
        (Target("ratio", 1.1), ">= 1.1", 1.1, 1.09),
        (Target("share", 0.5), ">= 50 %", 0.5, 0.49),
        (Target("growth", 0.05), "< 5 %", 0.049, 0.05),
    ):
        assert str(target) == text
        assert (target.is_met(good), target.is_met(bad)) == (True, False)


def test_numbers_read_as_people_write_them():
    seconds = [units.seconds(of) for of in (7.13e-5, 9.996e-4, 0.263, 12.0)]
    assert seconds == ["71.3 us", "1 ms", "263 ms", "12 s"]
    sizes = [units.size(of) for of in (256, 65536, 16 << 20, 3 << 30)]
    assert sizes == ["256 B", "64 KiB", "16 MiB", "3 GiB"]
    rates = [units.rate(of, "bytes") for of in (7.2e5, 7.2e6, 9.81e9)]
    assert rates == ["720 kB/s", "7.2 MB/s", "9.81 GB/s"]
    assert units.rate(4.13e11, "FLOP") == "413 GFLOP/s"
    percent = [units.percent(of) for of in (0.52, 0.0123, 1e-6, -1e-6, -0.3)]
    assert percent == ["52 %", "1.2 %", "< 0.1 %", "0.0 %", "-30 %"]
