"""NCCL's calls of a profiler, in its order; for processes that need no JAX."""

import ctypes
import os
import threading

GROUP, COLLECTIVE, PEER, KERNEL, GROUP_API, API = 1, 2, 4, 64, 256, 512
ID = 0x2119D7D9FE29DB1D


class Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint64),
        ("parent", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("rest", ctypes.c_uint8 * 100),
    ]


class Calls(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        *((each, ctypes.c_void_p) for each in ("init", "start", "stop", "state")),
        ("finalize", ctypes.c_void_p),
    ]


class Nccl:
    """One process's NCCL, of a version of the interface."""

    def __init__(self, version):
        self.version = version
        calls = Calls.in_dll(
            ctypes.CDLL(os.environ["WATCH_LIBRARY"]), f"ncclProfiler_v{version}"
        )
        p, i, u = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
        text = ctypes.c_char_p
        first = (p, p, text, u) if version == 4 else (p, u, p, text)
        self._init = ctypes.CFUNCTYPE(i, *first, i, i, i, p)(calls.init)
        self._start = ctypes.CFUNCTYPE(i, p, p, p)(calls.start)
        self._stop = ctypes.CFUNCTYPE(i, p)(calls.stop)
        self._finalize = ctypes.CFUNCTYPE(i, p)(calls.finalize)
        self.mask = ctypes.c_int(0)

    def join(self, rank, ranks, name=b"", id_=ID):
        context = ctypes.c_void_p()
        first = ctypes.byref(context), ctypes.byref(self.mask)
        given = (
            (*first, name, id_)
            if self.version == 4
            else (first[0], id_, first[1], name)
        )
        assert self._init(*given, 1, ranks, rank, None) == 0
        return context

    def begin(self, context, type_, parent=None, **fields):
        # The older event has a byte for the type, and anything after it.
        junk = 0x5A5A5A5A5A5A5A00 if self.version == 4 else 0
        event = Event(type=type_ | junk, parent=parent)
        if self.version == 4 and type_ > 255:
            return None
        for offset, value in fields.get("at", {}).items():
            ctypes.memmove(ctypes.addressof(event) + 24 + offset, value, len(value))
        handle = ctypes.c_void_p()
        assert self._start(context, ctypes.byref(handle), ctypes.byref(event)) == 0
        return handle.value

    def end(self, handle):
        # NCCL stops no event that it has no handle of.
        if handle is not None:
            assert self._stop(handle) == 0

    def send(self, context, peer):
        """What is told of a send, whose channels may be fewer than it says."""
        self.texts = b"Send", b"ncclInt8"
        names = [ctypes.cast(each, ctypes.c_void_p).value for each in self.texts]
        at = {
            0: names[0].to_bytes(8, "little"),
            16: names[1].to_bytes(8, "little"),
            32: peer.to_bytes(4, "little"),
            36: bytes([4]),
        }
        handle = self.begin(context, PEER, None, at=at)
        self.end(handle)
        return handle

    def enqueue(self, context, name, count=256, dtype=b"ncclFloat32", channels=2):
        group_api = self.begin(context, GROUP_API)
        api = self.begin(context, API, group_api)
        self.end(api)
        group = self.begin(context, GROUP)
        # Each would cost two calls and more.
        assert (group_api, api, group) == (None, None, None)
        self.texts = name, dtype  # NCCL keeps them
        names = [ctypes.cast(each, ctypes.c_void_p).value for each in self.texts]
        at = {
            8: names[0].to_bytes(8, "little"),
            32: count.to_bytes(8, "little"),
            48: names[1].to_bytes(8, "little"),
            56: bytes([channels]),
        }
        handle = self.begin(context, COLLECTIVE, api, at=at)
        self.end(handle)
        self.end(group)
        self.end(group_api)
        return handle

    def run(self, context, handle, channels=2, ends=True):
        """The GPU's events, from the thread that NCCL has for them."""

        def tell():
            begun = [self.begin(context, KERNEL, handle) for _ in range(channels)]
            for each in begun if ends else ():
                self.end(each)

        thread = threading.Thread(target=tell)
        thread.start()
        thread.join()

    def finalize(self, context):
        assert self._finalize(context) == 0
