"""`wkvm bench engine`: what the engine costs without HTTP."""
