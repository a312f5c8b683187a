"""`python -m kvstored.kvctl`."""

import sys

from kvstored.kvctl.command import main

sys.exit(main())
