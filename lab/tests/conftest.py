"""The settings and fixtures of the core's tests hold here, too."""

from tests.conftest import a_tile_for_each_tensor, device, no_spare_memory, no_waiting_for_the_disk, parts_as_objects

__all__ = ["a_tile_for_each_tensor", "device", "no_spare_memory", "no_waiting_for_the_disk", "parts_as_objects"]
