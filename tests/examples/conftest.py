import os
import subprocess
import sys

import forked
import jax
import pytest
import waiting


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    """Lets examples and optax add what the tests of jaxcomm itself refuse to add."""
    # Counts jax's devices now: the demo sets their number where jax has not started.
    assert len(jax.devices()) == 8
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Folder:
    """A folder with a text, and the Pythons that run in it."""

    def __init__(self, path, compiled_once):
        self.path = path
        lines = "".join(f"{i} squared is {i * i}\n" for i in range(999))
        (path / "text.txt").write_text(lines)
        # Its own number of devices.
        self._environment = os.environ | {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]}
        self._environment |= compiled_once
        self._started = []

    def start(self, *arguments, **variables):
        self._started.append(
            forked.Popen(
                [sys.executable, *arguments, "--text=text.txt"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=self.path,
                env=self._environment | variables,
            )
        )
        return self._started[-1]

    def ended(self, process):
        """Return what it printed; several processes compile on a few busy cores."""
        return process.communicate(timeout=4 * waiting.HANG_SECONDS)

    def stop(self):
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, compiled_once):
    made = Folder(tmp_path_factory.mktemp("demo"), compiled_once)
    yield made
    made.stop()
