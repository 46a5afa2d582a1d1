"""`python -m wkvm_core` is `wkvm-core`."""

from wkvm_core.daemon.main import main

if __name__ == "__main__":
    main()
