"""`python -m wkvm_frontend` is `wkvm-api`."""

from wkvm_frontend.main import main

if __name__ == "__main__":
    main()
