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
class Text:
    """A text, split once for all runs.

    Attributes:
      train: uint8, its first part.
      validation: uint8, the rest, never trained on.
      source: where it comes from, for people.
      digest: of all bytes and of where they are split; equal texts draw equal batches.
    """

    train: np.ndarray
    validation: np.ndarray
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
        content, files = _read_folder(root, "*.py", _SKIPPED_FOLDERS)
        source = f"{files} source files of the Python standard library"
    elif _is_folder(path):
        content, files = _read_folder(path, "*", without=without)
        source = f"{files} files in {path}"
    else:
        content, source = _read_file(path), str(path)
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
    digest = hashlib.sha256(content + held_out.to_bytes(8, "big")).hexdigest()[:16]
    array = np.frombuffer(content, np.uint8)
    return Text(array[:-held_out], array[-held_out:], source, digest)


def draw_batch(text: np.ndarray, step: int, *, rows: int, sequence: int, seed: int):
    """Draw the batch of a step: the same for the same arguments, on any run.

    Args:
      text: uint8, longer than ``sequence``.
      step: counted from 0.
      rows: sequences in the batch.
      sequence: tokens of each.
      seed: of the random numbers.

    Returns:
      Tokens and the targets that follow them, int32 (rows, sequence) each.
    """
    random = np.random.default_rng([seed, step])
    starts = random.integers(0, len(text) - sequence, rows)
    windows = np.stack([text[start : start + sequence + 1] for start in starts])
    windows = windows.astype(np.int32)
    return windows[:, :-1], windows[:, 1:]


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
) -> tuple[bytes, int]:
    """Join the text files below a folder, passing over those that are not text."""
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
    return b"\n".join(parts), len(parts)


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content
