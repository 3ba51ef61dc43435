import matplotlib.figure
import pytest

from bench import plot


def test_every_kind_of_row_can_be_drawn(rows, tmp_path):
    path = tmp_path / "bench.png"
    plot.save(str(path), rows, "a machine")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_measured_still_gives_a_picture(tmp_path):
    path = tmp_path / "bench.svg"
    plot.save(str(path), [], "a machine")
    assert "a machine" in path.read_text() or path.stat().st_size > 0


def test_a_variant_that_is_faster_than_ours_is_red(timed_row):
    times = {"jaxcomm": 2.0, "slow": 3.0, "fast": 1.0}
    figure = matplotlib.figure.Figure()
    plot._bars(figure, [timed_row("attention", "forward", times, None, None)])
    red = [x.get_text() for x in figure.axes[0].texts if x.get_color() == "tab:red"]
    assert red == ["1 s (0.50 x ours)"]


@pytest.mark.parametrize(
    ("path", "known"),
    [("x.png", True), ("a/x.SVG", True), ("x.nope", False), ("x", False)],
)
def test_the_ending_chooses_the_format(path, known):
    assert plot.supports(path) is known
