"""The stateless side: HTTP, templates, tokens to text and back. Speaks to the core in messages only."""
