from __future__ import annotations

import os

# Before torch is loaded: worker threads that wait must not spin beside the processes that the tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# As the core does in deterministic mode.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
