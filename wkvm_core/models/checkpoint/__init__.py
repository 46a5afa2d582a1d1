"""Checkpoints as plain tensors: readers that run no code of the file, the folder around them, the model fingerprint."""
