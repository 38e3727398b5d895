"""The ops in Triton, one per file. Kernels cast to float32 right after each load."""
