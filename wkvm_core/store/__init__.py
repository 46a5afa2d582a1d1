"""Snapshots by name, and the host memory their bytes lie in. Never imports torch."""
