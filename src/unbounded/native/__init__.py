"""The C++ core behind its C ABI: library (loading), host_memory (buffers), kernels (optimizers), disk (extents)."""
