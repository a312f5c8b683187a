"""`python -m kvstored` is the `kvstored` command."""

import sys

from kvstored.cli import main

if __name__ == "__main__":
    sys.exit(main())
