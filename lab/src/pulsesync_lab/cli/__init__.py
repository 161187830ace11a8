"""The commands `pulse demo`, `pulse study` and `pulse plan`, which `pulsesync.cli` finds where this is installed."""
