"""GPU kernels of QSA in the Triton language, one module per step.

Every kernel's arguments stand in the order in which TensorRT passes them to an ahead-of-time
kernel: input pointers, 32-bit integers, output pointers; whatever is known when an engine is built
is a compile-time constant. `DOT` is the element type of matrix products: bfloat16 or float16 on a
GPU, float32 in Triton's interpreter, which cannot multiply bfloat16.
"""
