"""What must be so before any test module is imported."""

import os

from hypothesis import Phase, settings

# OpenMP threads that spin while they wait make a contended machine many times slower. The engine
# sets this too, but torch reads it once, and other tests load torch first.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# For mutants: whether a failure is found, and not how small it can be made, which takes minutes.
settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.reuse, Phase.generate])

# Fixtures of a whole session have to be registered here to be one and the same everywhere.
pytest_plugins = ["tiers.object_servers"]
