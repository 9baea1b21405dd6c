"""The GPU backend: a plan's nodes as lists of kernel launches, over any device that runs Metal kernels."""
