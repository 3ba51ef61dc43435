"""Run ``python -m jaxcomm.launch``: see ``--help``."""

import sys

from jaxcomm.launch import options, run

if __name__ == "__main__":
    sys.exit(run.run(options.parse(sys.argv[1:])))
