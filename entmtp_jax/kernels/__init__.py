"""Optional native kernels for CPUs; whatever they compute can also be computed by XLA alone."""
