"""The kernels of `kernels.cuda`, by topic."""
