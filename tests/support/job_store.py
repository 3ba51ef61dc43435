"""Processes that are threads, and a key-value store in which they meet."""

import collections
import threading

from jaxcomm.communicator import rendezvous


class JobStore:
    """What the client of ``jax.distributed`` shows of the store, and counts.

    Attributes:
      messages: by the thread that sent them.
      sent_bytes: keys and texts, by the thread that read them.
      slow: threads whose waits take longer than they should.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._folders = collections.defaultdict(dict)
        self._waits = collections.defaultdict(list)
        self.messages = collections.Counter()
        self.sent_bytes = collections.Counter()
        self.slow = set()

    def key_value_set(self, key, text, allow_overwrite=False):
        with self._lock:
            self._count()
            folder = self._folders[key.rpartition("/")[0]]
            if not allow_overwrite and key in folder:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            folder[key] = text
            for came in self._waits.pop(key, ()):
                came.set()

    def key_value_dir_get(self, folder):
        """Folders of folders are not asked for: the store would search all of them."""
        with self._lock:
            found = list(self._folders.get(folder, {}).items())
            self._count(sum(len(key) + len(text) for key, text in found))
        return found

    def key_value_try_get(self, key):
        with self._lock:
            return self._read(key, f"NOT_FOUND: {key}")

    def blocking_key_value_get(self, key, milliseconds):
        came = threading.Event()
        with self._lock:
            if key in self._folders[key.rpartition("/")[0]]:
                return self._read(key)
            self._waits[key].append(came)
        seconds = milliseconds / 1e3
        came.wait(8 * seconds if threading.get_ident() in self.slow else seconds)
        with self._lock:
            if not came.is_set():
                self._waits[key].remove(came)
            return self._read(key, f"DEADLINE_EXCEEDED: {key}")

    def entry(self, key):
        """Returns a text, None if there is none; counts nothing."""
        with self._lock:
            return self._folders[key.rpartition("/")[0]].get(key)

    def _read(self, key, error=None):
        text = self._folders[key.rpartition("/")[0]].get(key)
        if text is None:
            self._count()
            raise RuntimeError(error)
        self._count(len(key) + len(text))
        return text

    def _count(self, read=0):
        self.messages[threading.get_ident()] += 1
        self.sent_bytes[threading.get_ident()] += read


class Processes:
    """Runs ``function(process)`` in a thread for each of several processes."""

    def __init__(self, store):
        self.store = store

    def run(self, functions):
        """Returns what each function returned or raised, and its messages."""
        found = {}

        def run(process, function):
            before = self.store.messages[threading.get_ident()]
            try:
                value = function(process)
            except Exception as error:
                value = error
            messages = self.store.messages[threading.get_ident()] - before
            found[process] = value, messages

        threads = [
            threading.Thread(target=run, args=pair, daemon=True)
            for pair in functions.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert found.keys() == functions.keys(), "some never came back"
        values = {process: value for process, (value, _) in found.items()}
        return values, {process: count for process, (_, count) in found.items()}


def meets(everyone, what="make it", value=None, key=0, number=None):
    """Returns a function that meets the others, given the process."""

    def meet(process):
        purpose = rendezvous.Purpose(what, key, number)
        given = process * 10 if value is None else value
        return rendezvous.meet(everyone, process, purpose, given)

    return meet
