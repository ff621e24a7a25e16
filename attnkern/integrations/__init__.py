"""attnkern inside other software: torch itself (sdpa.py) and libraries on top of it."""
