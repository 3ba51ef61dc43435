import pytest

from bench import units


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (units.seconds(7.13e-5), "71.3 us"),
        (units.seconds(9.996e-4), "1 ms"),
        (units.seconds(0.263), "263 ms"),
        (units.seconds(12.0), "12 s"),
        (units.size(256), "256 B"),
        (units.size(65536), "64 KiB"),
        (units.size(16 << 20), "16 MiB"),
        (units.size(3 << 30), "3 GiB"),
        (units.rate(7.2e5, "bytes"), "720 kB/s"),
        (units.rate(7.2e6, "bytes"), "7.2 MB/s"),
        (units.rate(9.81e9, "bytes"), "9.81 GB/s"),
        (units.rate(4.13e11, "FLOP"), "413 GFLOP/s"),
        (units.percent(0.52), "52 %"),
        (units.percent(0.0123), "1.2 %"),
        (units.percent(1e-6), "< 0.1 %"),
        (units.percent(-1e-6), "0.0 %"),
        (units.percent(-0.3), "-30 %"),
    ],
)
def test_numbers_read_as_people_write_them(found, text):
    assert found == text
