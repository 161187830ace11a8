"""The version of the package: the build, `pulsesync.__version__` and `pulse --version` all read it from here."""

__version__ = "0.2.0.dev0"
