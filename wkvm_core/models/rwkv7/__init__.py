"""RWKV-7 ("Goose"): names, weights and forward pass."""
