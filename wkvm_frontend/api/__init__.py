"""Routes: bodies in, answers and streams out."""
