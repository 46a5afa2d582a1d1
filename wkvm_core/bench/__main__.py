"""`python -m wkvm_core.bench`."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from wkvm_core.bench.main import main

if __name__ == "__main__":
    main()
