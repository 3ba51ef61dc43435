"""What the processes write, as whole lines that say who wrote them."""

import contextlib
import errno
import os
import selectors
import sys
import threading
from collections.abc import Mapping

_OWN_PREFIX = b"jaxcomm.launch: "
_CHUNK_BYTES = 1 << 16
# Memory stays bounded though a program never ends its line.
_LONGEST_LINE_BYTES = 1 << 20


class Lines:
    """Cuts a stream of bytes into lines and puts a prefix before each."""

    def __init__(self, prefix: bytes):
        self._prefix = prefix
        self._partial = b""

    def add(self, chunk: bytes) -> bytes:
        """Return the lines that the chunk completes."""
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) >= _LONGEST_LINE_BYTES:
            whole.append(self._partial)
            self._partial = b""
        return b"".join(self._prefix + line + b"\n" for line in whole)

    def end(self) -> bytes:
        """Return what came after the last newline, as a line."""
        return self.add(b"\n") if self._partial else b""


class Pump(threading.Thread):
    """Copies pipes to one stream until all are closed or :meth:`finish` is called.

    Args:
      sources: prefix by file descriptor to read; they are closed at the end.
      target: file descriptor to write to.
      writing: held while lines are written. Streams that are one in the end, a terminal
        or 2>&1, share it, so that they do not mix their lines.

    Attributes:
      is_unread: whether nobody reads the stream any more.
    """

    def __init__(
        self, sources: Mapping[int, bytes], target: int, writing: threading.Lock
    ):
        super().__init__(daemon=True)
        self.is_unread = False
        self._lines = {source: Lines(prefix) for source, prefix in sources.items()}
        self._target = target
        self._writing = writing
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
                ready = selector.select(0 if self._finishing.is_set() else None)
                if not ready:
                    break
                for key, _ in ready:
                    if key.fd == self._wake_read:
                        selector.unregister(key.fd)
                    elif chunk := os.read(key.fd, _CHUNK_BYTES):
                        self._write(self._lines[key.fd].add(chunk))
                    else:
                        selector.unregister(key.fd)
                        open_sources.discard(key.fd)
                        self._write(self._lines[key.fd].end())
        for source in open_sources:
            self._write(self._lines[source].end())

    def _write(self, data: bytes):
        with self._writing:
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
        self._writing = threading.Lock()
        self._own_write = -1

    def follow(self, pipes: Mapping[int, tuple[int, int]]):
        """Copy stdout and stderr, given as pipes by process id, from now on."""
        if sys.stdout is not None:
            sys.stdout.flush()
        out = {pipe: b"[%d] " % process for process, (pipe, _) in pipes.items()}
        err = {pipe: b"[%d] " % process for process, (_, pipe) in pipes.items()}
        if not self._pumps:
            own_read, self._own_write = os.pipe()
            err[own_read] = _OWN_PREFIX
        pumps = [Pump(out, 1, self._writing), Pump(err, 2, self._writing)]
        for pump in pumps:
            pump.start()
        self._pumps += pumps

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
