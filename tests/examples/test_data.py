import re

import jax
import numpy as np
import pytest

from language_model import data
from language_model.settings import DemoError


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(32, 127)) * 40)
    return path


def test_reads_the_standard_library_without_arguments():
    text = data.load(None, 4096)
    assert text.train.size > 1_000_000
    assert text.validation.size > 10_000
    assert "Python standard library" in text.source
    assert data.load(None, 4096).digest == text.digest


def test_holds_out_the_end_of_the_text(text_file):
    text = data.load(text_file, 100)
    whole = np.concatenate((text.train.content, text.validation.content))
    assert whole.tobytes() == text_file.read_bytes()
    assert text.validation.size == 190
    # At least one sequence and its successor.
    longer = data.load(text_file, 1000)
    assert longer.validation.size == 1001
    assert longer.digest != text.digest == data.load(text_file, 50).digest


def test_reads_a_folder_by_name_and_passes_over_what_is_no_text(tmp_path):
    (tmp_path / "b.txt").write_text("bbbb" * 9)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "first.txt").write_text("aaaa" * 9)
    (tmp_path / "output" / "checkpoints").mkdir(parents=True)
    (tmp_path / "image.bin").write_bytes(b"\0\1")
    (tmp_path / ".hidden").write_text("hhhh")
    text = data.load(tmp_path, 4)
    whole = np.concatenate((text.train.content, text.validation.content)).tobytes()
    assert whole == b"aaaa" * 9 + b"\n" + b"bbbb" * 9
    assert text.source == f"2 files in {tmp_path}"
    assert text.train.starts.tolist() == [0, 37]
    with pytest.raises(DemoError, match="no text files below"):
        data.load(tmp_path / "output", 4)
    # What the demo itself writes is none of it.
    (tmp_path / "output" / "checkpoints" / "about").write_text("{}" * 9)
    again = data.load(tmp_path, 4, without=tmp_path / "output")
    assert again.digest == text.digest


def test_draws_the_same_batch_for_the_same_step(text_file):
    text = data.load(text_file, 100)

    def draw(step=7, seed=5):
        return data.draw_batch(text.train, step, rows=3, sequence=100, seed=seed)

    assert [of.shape for of in draw()] == [(3, 100)] * 3
    jax.tree.map(np.testing.assert_array_equal, draw(), draw())
    for other in (draw(seed=6), draw(step=8)):
        assert not np.array_equal(draw()[0], other[0])
    # From a text that just fits, too.
    short = data.Documents(np.arange(11, dtype=np.uint8), np.array([0]))
    tokens, targets, _ = data.draw_batch(short, 0, rows=2, sequence=10, seed=0)
    np.testing.assert_array_equal(targets, tokens + 1)
    assert targets.max() <= 10


def test_packs_pieces_of_documents():
    lengths = [7, 30, 1, 200, 12]
    starts = np.cumsum([0, *(n + 1 for n in lengths)])
    # Each byte says where it is.
    content = np.arange(starts[-1] - 1, dtype=np.uint8)
    text = data.Documents(content, starts[:-1])
    seen = set()
    for step in range(20):
        batch = data.draw_batch(text, step, rows=2, sequence=40, seed=0)
        for tokens, targets, documents in zip(*batch, strict=True):
            np.testing.assert_array_equal(targets, tokens + 1)
            assert documents[0] == 0
            assert len(set(documents.tolist())) >= 2
            for number in range(documents.max() + 1):
                piece = tokens[documents == number]
                np.testing.assert_array_equal(np.diff(piece), 1)
                (which,) = set(np.searchsorted(starts, piece, "right").tolist())
                # Nothing of the newline behind a document.
                assert piece[-1] < starts[which] - 1
                assert len(piece) <= 20
                seen.add(which)
    assert seen >= {2, 4, 5}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"text\0text" * 99, "holds NUL bytes or is not UTF-8"),
        (b"\xff\xfe" * 99, "holds NUL bytes or is not UTF-8"),
        (b"a" * 99, "has 99 bytes, too few for --sequence=100; pass --sequence=48"),
        (b"a" * 201, "has 201 bytes, too few for --sequence=100; pass --sequence=99"),
        (b"a", "has only 1 bytes; pass a longer one"),
    ],
)
def test_refuses_a_file_it_cannot_learn(tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DemoError, match=re.escape(message)):
        data.load(path, 100)
