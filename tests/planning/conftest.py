"""Nothing here starts a backend unless a test asks for devices."""

import subprocess
import sys
import textwrap

import pytest


@pytest.fixture
def alone():
    """Gives ``alone(code)``: what a fresh process prints."""

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
