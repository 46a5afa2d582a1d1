"""Talking to the cores: sockets, handshake, leases, and the events of each request."""
