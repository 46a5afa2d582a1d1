"""Math on tensors. Kernels know nothing of models; each op has its reference beside it."""
