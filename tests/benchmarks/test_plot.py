import pytest

from bench import plot


def test_every_kind_of_row_can_be_drawn(rows, timed_row, tmp_path):
    times = {"jaxcomm": 2.0, "slow": 3.0, "fast": 1.0}
    rows = [*rows, timed_row("attention", "backward", times, None, None)]
    plot.save(str(tmp_path / "bench.png"), rows, "a machine")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "known"),
    [("x.png", True), ("a/x.SVG", True), ("x.nope", False), ("x", False)],
)
def test_the_ending_chooses_the_format(path, known):
    assert plot.supports(path) is known
