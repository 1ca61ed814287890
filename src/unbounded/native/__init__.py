"""The C++ core behind its C ABI: library (loading), memory (host buffers), kernels (optimizers), disk (extents)."""
