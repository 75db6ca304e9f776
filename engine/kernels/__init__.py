"""Numba kernels whose result for a row depends on that row alone.

Every sum is taken in one fixed order, which does not depend on how many rows, outputs or threads take part. So equal bits are a
matter of construction, not of luck with a compiler: no kernel uses fast-math, and no kernel leaves a reduction to the vectoriser.
"""
