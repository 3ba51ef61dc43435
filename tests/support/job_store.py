"""Processes that are threads, and a key-value store in which they meet.

The store has a clock, which jaxcomm looks at in its place of the system's. Time goes on
only while all processes wait in the store: then to the end of the next wait. So a wait
ends in vain only if no process can end it, however busy the machine is. And a test of a
long timeout takes no time.
"""

import collections
import heapq
import itertools
import math
import threading

import waiting

from jaxcomm import compat
from jaxcomm.communicator import rendezvous

_STACK_BYTES = 512 << 10
_here = threading.local()


class _Wait:
    def __init__(self, key):
        self.key = key
        self.is_over = threading.Event()


class JobStore:
    """What the client of ``jax.distributed`` shows of the store, and counts.

    Attributes:
      now: what the clock shows, in seconds.
      messages: by the process that sent them.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._folders = collections.defaultdict(dict)
        self._waits = collections.defaultdict(list)
        self._ends = []
        self._turns = itertools.count()
        self._running = 0
        self.now = 0.0
        self.messages = collections.Counter()

    def serve(self, monkeypatch):
        """Be the store of the job, and the clock of those who wait in it."""
        monkeypatch.setattr(compat, "key_value_store", lambda: self)
        monkeypatch.setattr(rendezvous, "time", self)

    def run(self, functions):
        found, before = {}, self.messages.copy()

        def run(process, function):
            _here.process = process
            try:
                found[process] = function(process)
            except Exception as error:
                found[process] = error
            with self._lock:
                self._stop()

        with self._lock:
            self._running += len(functions)
        usual = threading.stack_size(_STACK_BYTES)
        threads = [
            threading.Thread(target=run, args=pair, name=f"process {pair[0]}")
            for pair in functions.items()
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        threading.stack_size(usual)
        waiting.joined(*threads)
        return found, {each: self.messages[each] - before[each] for each in functions}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self._wait(None, seconds)

    def tell(self, event):
        """Let an event happen, for those who :meth:`hear` it."""
        with self._lock:
            self._set(f"event/{event}", "")

    def hear(self, event):
        self._wait(f"event/{event}", math.inf)
        assert self.now < math.inf, f"nobody tells of {event}"

    def key_value_set(self, key, text, allow_overwrite=False):
        with self._lock:
            self._count()
            if not allow_overwrite and self._get(key) is not None:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self._set(key, text)

    def key_value_increment(self, key, by):
        with self._lock:
            self._count()
            self._set(key, str(int(self._get(key) or 0) + by))
            return int(self._get(key))

    def key_value_delete(self, key):
        with self._lock:
            self._count()
            self._folders[key.rpartition("/")[0]].pop(key, None)

    def key_value_dir_get(self, folder):
        """Return what is in a folder, but for its folders: nobody reads them."""
        with self._lock:
            found = list(self._folders.get(folder, {}).items())
            self._count()
        return found

    def key_value_try_get(self, key):
        with self._lock:
            return self._read(key, "NOT_FOUND")

    def blocking_key_value_get(self, key, milliseconds):
        self._wait(key, milliseconds / 1e3)
        with self._lock:
            return self._read(key, "DEADLINE_EXCEEDED")

    def all_keys(self):
        with self._lock:
            return [key for folder in self._folders.values() for key in folder]

    # All that follows but _wait requires _lock.

    def _wait(self, key, seconds):
        wait = _Wait(key)
        with self._lock:
            if key is not None and self._get(key) is not None:
                return
            self._waits[key].append(wait)
            heapq.heappush(self._ends, (self.now + seconds, next(self._turns), wait))
            self._stop()
        waiting.event(wait.is_over, f"{key} of the store")

    def _stop(self):
        """Count one that waits or has ended; of all that wait, let one go on."""
        self._running -= 1
        while self._running <= 0 and self._ends:
            end, _, wait = heapq.heappop(self._ends)
            if not wait.is_over.is_set():
                self.now = end
                self._waits[wait.key].remove(wait)
                self._go_on(wait)

    def _go_on(self, wait):
        self._running += 1
        wait.is_over.set()

    def _set(self, key, text):
        self._folders[key.rpartition("/")[0]][key] = text
        for wait in self._waits.pop(key, ()):
            self._go_on(wait)

    def _get(self, key):
        return self._folders[key.rpartition("/")[0]].get(key)

    def _read(self, key, error):
        text = self._get(key)
        self._count()
        if text is None:
            raise RuntimeError(f"{error}: {key}")
        return text

    def _count(self):
        self.messages[getattr(_here, "process", None)] += 1


def meets(everyone, purpose="make it"):
    return lambda process: rendezvous.meet(everyone, process, purpose, process * 10)
