"""Load on an OpenAI-compatible server: requests, their timing, and the figures made of it."""
