"""Run ``python -m jaxcomm.launch``: see ``--help``."""

import os
import sys

from jaxcomm.launch import options, run

if __name__ == "__main__":
    # A stream that was closed is not to become the next pipe that is made.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)
    sys.exit(run.run(options.parse(sys.argv[1:])))
