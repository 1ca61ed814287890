"""Updates on a GPU, imported when the first CUDA tensor is updated."""
