"""Weights and forward passes. Models know kernels and layouts, nothing of the scheduler or the store."""
