"""What the processes write, as whole lines that say who wrote them."""

import contextlib
import errno
import functools
import os
import selectors
import sys
import threading
from collections.abc import Collection, Mapping

_OWN_PREFIX = b"jaxcomm.launch: "
_CHUNK_BYTES = 1 << 16
# Memory stays bounded though a program never ends its line.
_LONGEST_LINE_BYTES = 1 << 20
# What stays without an end for so long is a question to who sits at the terminal.
_PROMPT_SECONDS = 0.1


class Lines:
    """Cuts a stream of bytes into lines and puts a prefix before each."""

    def __init__(self, prefix: bytes):
        self._prefix = prefix
        self._partial = b""

    def add(self, chunk: bytes, goes_on: bool = False) -> bytes:
        """Return the lines that the chunk completes; the first may go on with one."""
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) >= _LONGEST_LINE_BYTES:
            whole.append(self._partial)
            self._partial = b""
        lines = b"".join(self._prefix + line + b"\n" for line in whole)
        return lines.removeprefix(self._prefix) if goes_on else lines

    def has_partial(self) -> bool:
        """Say whether something came after the last newline."""
        return bool(self._partial)

    def take_partial(self, goes_on: bool = False) -> bytes:
        """Return what came after the last newline, which is then no longer held."""
        partial, self._partial = self._partial, b""
        return partial if goes_on or not partial else self._prefix + partial


class Writing:
    """One terminal, pipe or file, to which several write in turn.

    Attributes:
      lock: held while somebody writes.
      unfinished: whose line it is that has no end yet.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.unfinished: Lines | None = None


class Pump(threading.Thread):
    """Copies pipes to one stream until all are closed or :meth:`finish` is called.

    Args:
      sources: prefix by file descriptor to read; they are closed at the end.
      target: file descriptor to write to.
      writing: shared by streams that are one in the end, a terminal or 2>&1, so that
        they do not mix their lines.
      prompting: of the sources, those whose lines are shown before they end, once
        nothing more comes for a moment.

    Attributes:
      is_unread: whether nobody reads the stream any more.
    """

    def __init__(
        self,
        sources: Mapping[int, bytes],
        target: int,
        writing: Writing,
        prompting: Collection[int] = (),
    ):
        super().__init__(daemon=True)
        self.is_unread = False
        self._lines = {source: Lines(prefix) for source, prefix in sources.items()}
        self._target = target
        self._writing = writing
        self._prompting = [self._lines[source] for source in prompting]
        self._finishing = threading.Event()
        self._wake_read, self._wake_write = os.pipe()

    def finish(self):
        """Copy what has been written so far and end, though a pipe is still open."""
        self._finishing.set()
        # It reads the end of this pipe.
        os.close(self._wake_write)
        self.join()

    def run(self):
        try:
            self._copy()
        except OSError as error:
            # The processes get a broken pipe when they write on.
            self.is_unread = error.errno == errno.EPIPE
            if not self.is_unread:
                text = f"output cannot be written: {error.strerror}\n"
                with contextlib.suppress(OSError):
                    os.write(2, _OWN_PREFIX + text.encode())
        finally:
            for descriptor in (*self._lines, self._wake_read):
                os.close(descriptor)

    def _copy(self):
        with selectors.DefaultSelector() as selector:
            for source in self._lines:
                selector.register(source, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            open_sources = set(self._lines)
            while open_sources:
                is_asked = any(lines.has_partial() for lines in self._prompting)
                seconds = _PROMPT_SECONDS if is_asked else None
                ready = selector.select(0 if self._finishing.is_set() else seconds)
                if not ready and self._finishing.is_set():
                    break
                if not ready:
                    for lines in self._prompting:
                        self._write(lines, lines.take_partial, is_whole=False)
                for key, _ in ready:
                    if key.fd == self._wake_read:
                        selector.unregister(key.fd)
                    elif chunk := os.read(key.fd, _CHUNK_BYTES):
                        lines = self._lines[key.fd]
                        self._write(lines, functools.partial(lines.add, chunk))
                    else:
                        self._end(self._lines[key.fd])
                        selector.unregister(key.fd)
                        open_sources.discard(key.fd)
        for source in open_sources:
            self._end(self._lines[source])

    def _end(self, lines):
        if lines.has_partial() or self._writing.unfinished is lines:
            self._write(lines, functools.partial(lines.add, b"\n"))

    def _write(self, lines, take, is_whole=True):
        with self._writing.lock:
            others = self._writing.unfinished not in (None, lines)
            data = take(goes_on=self._writing.unfinished is lines)
            if not data:
                return
            self._writing.unfinished = None if is_whole else lines
            if others:
                data = b"\n" + data
            while data:
                data = data[os.write(self._target, data) :]


class Output:
    """Where the processes' output goes, and the launcher's own messages.

    Args:
      prefix: whether there are prefixes. If not, the processes inherit the streams.

    Attributes:
      is_unread: whether nobody reads a stream any more, as after ``head``; known once
        it is finished, and with prefixes.
    """

    def __init__(self, prefix: bool):
        self.piped = prefix
        self.is_unread = False
        self._pumps: list[Pump] = []
        self._own_write = -1

    def follow(self, pipes: Mapping[int, tuple[int, int]]):
        """Start to copy stdout and stderr, given as pipes by process id."""
        if sys.stdout is not None:
            sys.stdout.flush()
        writing = Writing()
        own_read, self._own_write = os.pipe()
        out = {pipe: b"[%d] " % process for process, (pipe, _) in pipes.items()}
        err = {pipe: b"[%d] " % process for process, (_, pipe) in pipes.items()}
        err[own_read] = _OWN_PREFIX
        # Process 0 is the one that hears the answer.
        asking = pipes.get(0, ())
        self._pumps = [
            Pump(
                of,
                target,
                writing,
                [pipe for pipe in asking if pipe in of and os.isatty(target)],
            )
            for of, target in ((out, 1), (err, 2))
        ]
        for pump in self._pumps:
            pump.start()

    def say(self, text: str):
        """Write a line of the launcher's own to stderr.

        Through a pump, so that the processes are looked after though nobody reads.
        """
        line = text.encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            if self._pumps:
                os.write(self._own_write, line)
            else:
                os.write(2, _OWN_PREFIX + line)

    def finish(self):
        """Write what is left, once the processes have ended."""
        if self._pumps:
            os.close(self._own_write)
        while self._pumps:
            pump = self._pumps.pop()
            pump.finish()
            self.is_unread = self.is_unread or pump.is_unread
