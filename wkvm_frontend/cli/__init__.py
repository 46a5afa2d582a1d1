"""The `wkvm` command."""
