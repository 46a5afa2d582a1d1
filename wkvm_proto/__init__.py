"""What the core and the frontend say to each other. Imports msgspec, pyzmq and the standard library only."""

__version__ = "0.1.0"
