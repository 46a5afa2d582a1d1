"""Stand-ins for what a test cannot have: a core that says what it is told to."""
