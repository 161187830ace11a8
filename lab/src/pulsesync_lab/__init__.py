"""For the study of weight updates: recordings, forecasts, experiments, the demo, charts. No worker needs it.

A distribution of its own, `pulsesync-lab`, of the same version as the pulsesync that it needs.
"""

__version__ = "0.2.0.dev0"
