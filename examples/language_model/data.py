"""Text to train on, as bytes, and the batches drawn from it."""

import dataclasses
import hashlib
import pathlib
import sysconfig

import numpy as np

from language_model.settings import DemoError

_VALIDATION_SHARE = 0.05
# Of the standard library: installed packages differ between machines, tests hold files
# broken on purpose, and the last two hold tables more than code.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents, one after the other.

    Attributes:
      content: uint8, all bytes; a newline is between two documents.
      starts: int64, where each document begins; the first at 0.
    """

    content: np.ndarray
    starts: np.ndarray

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.content.size


@dataclasses.dataclass(frozen=True)
class Text:
    """A text, split once for all runs.

    Attributes:
      train: its first part.
      validation: the rest, never trained on.
      source: where it comes from, for people.
      digest: of all documents and of where they are split; equal texts draw equal
        batches.
    """

    train: Documents
    validation: Documents
    source: str
    digest: str


def load(
    path: pathlib.Path | None, sequence: int, without: pathlib.Path | None = None
) -> Text:
    """Read and split a text.

    Args:
      path: a file, or a folder whose text files are read in the order of their names.
        If None, the Python standard library's source files.
      sequence: tokens of a sequence; both parts hold at least one, and its successor.
      without: a folder whose files are not read, where the demo writes its own.

    Raises:
      DemoError: there is no text at ``path``, it is binary, or too short.
    """
    if path is None:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        files = _read_folder(root, "*.py", _SKIPPED_FOLDERS)
        source = f"{len(files)} source files of the Python standard library"
    elif _is_folder(path):
        files = _read_folder(path, "*", without=without)
        source = f"{len(files)} files in {path}"
    else:
        files, source = [_read_file(path)], str(path)
    content = b"\n".join(files)
    starts = np.cumsum([0, *(len(file) + 1 for file in files)])[:-1]
    longest = len(content) // 2 - 1
    if longest < sequence:
        raise DemoError(
            f"the text ({source}) has {len(content):,} bytes, too few for "
            f"--sequence={sequence}; pass --sequence={max(longest, 1)} or less, or a "
            "longer text"
            if longest > 0
            else f"the text ({source}) has only {len(content)} bytes; pass a longer one"
        )
    held_out = max(round(len(content) * _VALIDATION_SHARE), sequence + 1)
    identity = content + starts.tobytes() + held_out.to_bytes(8, "big")
    digest = hashlib.sha256(identity).hexdigest()[:16]
    array = np.frombuffer(content, np.uint8)
    edge = len(content) - held_out
    return Text(
        Documents(array[:edge], starts[starts < edge]),
        # It may begin within a document.
        Documents(array[edge:], np.append(0, starts[starts > edge] - edge)),
        source,
        digest,
    )


def draw_batch(text: Documents, step: int, *, rows: int, sequence: int, seed: int):
    """Draw the batch of a step: the same for the same arguments, on any run.

    A sequence is packed with pieces of documents: whole ones up to half a sequence, and
    that much of longer ones.

    Args:
      text: longer than ``sequence``.
      step: counted from 0.
      rows: sequences in the batch.
      sequence: tokens of each.
      seed: of the random numbers.

    Returns:
      Tokens, the targets that follow them, and which document of the sequence each is
      of, int32 (rows, sequence) each.
    """
    random = np.random.default_rng([seed, step])
    packed = [_pack(text, sequence, random) for _ in range(rows)]
    places, documents = (np.stack(of) for of in zip(*packed, strict=True))
    tokens, targets = text.content[places], text.content[places + 1]
    return tokens.astype(np.int32), targets.astype(np.int32), documents


def _pack(text: Documents, sequence: int, random: np.random.Generator):
    """Return which bytes a sequence has, and of which of its documents each is."""
    # The newline behind a document, and the last byte of all, are targets alone.
    ends = np.append(text.starts[1:], text.size) - 1
    places = np.zeros(sequence, np.int64)
    documents = np.zeros(sequence, np.int32)
    filled = number = 0
    while filled < sequence:
        # By bytes: a long document is drawn more often than a short one.
        at = int(random.integers(text.size - 1))
        document = int(np.searchsorted(text.starts, at, "right")) - 1
        first, end = int(text.starts[document]), int(ends[document])
        count = min(end - first, -(-sequence // 2), sequence - filled)
        start = min(max(first, at - count // 2), end - count)
        places[filled : filled + count] = np.arange(start, start + count)
        documents[filled : filled + count] = number
        filled, number = filled + count, number + 1
    return places, documents


def _is_folder(path: pathlib.Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False  # reading it says what is wrong


def _read_file(path: pathlib.Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DemoError(f"--text={path} cannot be read: {error.strerror}") from error
    if not content:
        raise DemoError(f"--text={path} is empty; pass a file with text")
    if not _is_text(content):
        raise DemoError(
            f"--text={path} is not text: it holds NUL bytes or is not UTF-8; pass a "
            "text file"
        )
    return content


def _read_folder(
    root: pathlib.Path,
    pattern: str,
    skipped: frozenset[str] = frozenset(),
    without: pathlib.Path | None = None,
) -> list[bytes]:
    """Return the text files below a folder, without those that are not text."""
    parts = []
    for file in sorted(
        root.rglob(pattern), key=lambda file: file.relative_to(root).parts
    ):
        folders = file.relative_to(root).parts[:-1]
        hidden = any(part.startswith(".") for part in (*folders, file.name))
        if hidden or skipped.intersection(folders) or not file.is_file():
            continue
        if without is not None and file.resolve().is_relative_to(without.resolve()):
            continue
        try:
            content = file.read_bytes()
        except OSError:
            continue
        if content and _is_text(content):
            parts.append(content)
    if not parts:
        raise DemoError(
            f"no text files below {root}; pass another file or folder as --text"
        )
    return parts


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content
