"""Sampling on a GPU: all of a row in one program of one launch. The reference is `wkvm_core.kernels.draw`."""
