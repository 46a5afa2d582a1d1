"""`wkvm serve` over the stand-in programs."""

from __future__ import annotations

import sys
from pathlib import Path

from wkvm_frontend.cli.serve import Programs, main

here = Path(__file__).parent

if __name__ == "__main__":
    core, frontend = ((sys.executable, "-S", str(here / f"stand_in_{name}.py")) for name in ("core", "api"))
    sys.exit(main(sys.argv[1:], Programs(core, frontend)))
