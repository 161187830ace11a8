"""Settings that hold for every test."""

from hypothesis import settings

# No deadline: the first example of a test may wait for numba to compile a kernel.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=2000)  # pytest --hypothesis-profile=thorough
settings.load_profile("default")
