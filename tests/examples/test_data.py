import re

import numpy as np
import pytest

from language_model import data
from language_model.settings import DemoError


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
        (b"a" * 99, "has 99 bytes, too few for --sequence=100; pass --sequence=48"),
    ],
)
def test_refuses_a_file_it_cannot_learn(tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DemoError, match=re.escape(message)):
        data.load(path, 100)
