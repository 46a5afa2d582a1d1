"""Counting what happens at the HTTP side, and showing it together with the cores' figures."""
