"""The two slots of every bank that belong to nobody."""

ZERO_SLOT = 0
"""Read by fresh and padded rows, never written."""
SINK_SLOT = 1
"""Written by padded, stopped and halted rows, never read."""
RESERVED_SLOTS = 2
