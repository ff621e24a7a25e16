"""The compile gate: every kernel, compiled for every architecture it claims, held to what it claims.

`case` is what a claim is made of, `cases` lists them, `compilers` and `binary` compile and read what came out, `cache`
keeps that, `rules` checks it. ``python -m gate`` (``make gate``) prints the table; tests/test_gate.py asserts it.
"""
