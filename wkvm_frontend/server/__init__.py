"""The HTTP server process: sockets, connection limits, shutdown."""
