"""Layouts, slots, cursors and snapshots: integers and values, never tensors."""
