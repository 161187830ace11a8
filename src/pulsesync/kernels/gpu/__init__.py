"""The kernels of `kernels.cuda`, in rooms."""
