"""What must be so before any test module is imported."""

import os

# OpenMP threads that spin while they wait make a contended machine many times slower. The engine
# sets this too, but torch reads it once, and other tests load torch first.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
