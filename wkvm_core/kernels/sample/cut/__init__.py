"""Which ids of a row a draw keeps, and the draw."""
