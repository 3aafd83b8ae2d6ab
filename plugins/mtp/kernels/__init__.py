"""GPU kernels of the draft layer's input in the Triton language.

Arguments stand in the order in which TensorRT passes them to an ahead-of-time kernel: input
pointers, 32-bit integers, output pointers; then what is known when an engine is built. A program
normalises one row of `D` values in `BLOCK` lanes, a power of two.
"""
