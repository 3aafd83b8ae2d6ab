"""Kernels in the Triton language compiled ahead of time, for TensorRT and for direct launches."""
