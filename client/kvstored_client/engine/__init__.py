"""A small, readable inference engine on torch that shows how an engine uses kvstored.

Read checkpoint.py, model.py, blocks.py, engine.py, hook.py, in that order; docs/engine.md says why.
"""

import os

# OpenMP's threads wait for each other many thousand times per token. By default they wait spinning,
# and where something else wants the cores, such as a daemon, that costs more than the work does.
# The library reads this when torch is loaded, so it stands before every module that imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
