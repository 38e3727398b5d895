"""Triton kernels, one op family per file; `phyai.kernels.triton_rows` lists when each is chosen.

Kernels cast to float32 right after each load: the interpreter has no 16-bit arithmetic.
"""
