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


@pytest.mark.parametrize(
    ("path", "known"),
    [("x.png", True), ("a/x.SVG", True), ("x.nope", False), ("x", False)],
)
def test_the_ending_chooses_the_format(path, known):
    assert plot.supports(path) is known
