"""Triton kernels, imported as ``attnkern.triton_kernels`` only.

The top-level name ``triton_kernels`` belongs to another distribution, which an import from this folder's parent would
shadow: hence the refusal, and relative imports throughout this package.
"""

if __name__ != "attnkern.triton_kernels":
    raise ImportError(
        f"import attnkern.triton_kernels, not {__name__}: the bare name belongs to another distribution, "
        "which attnkern's source folder on sys.path hides."
    )
