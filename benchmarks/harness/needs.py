"""What a benchmark needs and this machine does not have: a GPU, a framework, a recorded run."""

MISSING = 77  # the exit code of a benchmark that needs what is not here


class MissingError(Exception):
    """Says what is missing, as in "a CUDA GPU"."""
