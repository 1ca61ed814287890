"""The C++ core through its C ABI: library (loading), host_memory (buffers), kernels (optimizers), disk (extents)."""
