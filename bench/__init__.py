"""Benchmarks of attnkern against F.scaled_dot_product_attention: ``python -m bench --help``."""
