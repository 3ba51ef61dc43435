"""Writes what a watched process compiles: see :mod:`jaxcomm.diagnostics.programs`."""

import contextlib
import os
import pathlib
import threading

import jax

from jaxcomm import compat
from jaxcomm.diagnostics import programs

_FROM_CACHE = "/jax/compilation_cache/cache_hits"


class Compiled:
    """The file of a process. It is complete, or it is gone.

    Args:
      path: of the file.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._known: set[str] = set()
        self._hits = 0
        self._bytes = 0
        self._is_kept = True

    def keep(self) -> None:
        """Begin, before this process compiles anything."""
        self._path.unlink(missing_ok=True)
        self._write(programs.head(self._process))
        jax.monitoring.register_event_listener(self._count)
        if not compat.around_compilation(self._before, self._after, self._give_up):
            self._give_up()

    def _count(self, event, **_):
        self._hits += event == _FROM_CACHE

    def _before(self):
        return self._hits

    def _after(self, hits, executable, processes):
        if not self._is_kept or os.getpid() != self._process or len(processes) < 2:
            return
        try:
            # Its line numbers are those of the run that compiled it.
            note = " when it was compiled" if self._hits != hits else ""
            for module in executable.hlo_modules():
                text = module.to_string()
                if len(text) > programs.MOST_TEXT:
                    self._give_up()
                elif node := programs.parse(text):
                    self._add(programs.to_json(node, processes, note))
        except Exception:
            # A program must not end since it is watched.
            self._give_up()

    def _add(self, line):
        with self._lock:
            if line not in self._known:
                self._known.add(line)
                self._write(line)

    def _write(self, line):
        self._bytes += len(line) + 1
        if self._bytes > programs.MOST_BYTES:
            self._give_up()
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            if os.write(file, f"{line}\n".encode()) != len(line) + 1:
                raise OSError("no room")
        finally:
            os.close(file)

    def _give_up(self):
        """Leave no file: without a program, others would be taken for it."""
        self._is_kept = False
        with contextlib.suppress(OSError):
            self._path.unlink()
