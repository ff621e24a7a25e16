"""attnkern inside other software: torch itself (sdpa/) and libraries on top of it."""
