"""A run as the delta folders of slime, miles and stitch, and their delta folders as a run; bit for bit, both ways.

    with DeltaExporter("s3://bucket/run", "updates") as exporter:
        exporter.update()              # updates/weight_v000004 is a checkpoint, weight_v000005 what changed since, …

    with DeltaImporter("updates", "s3://bucket/run", base="Qwen3-8B") as importer:
        importer.update()              # publishes a version for the base and for every folder

What the folders consist of is in `deltas`. A folder appears whole or not at all: it is written under another name
and renamed when all of it is on the disk. Both resume: run them again after an interruption, or when there is more.
"""

from pulsesync.integrations.delta_folder.deltas import DeltaVersion
from pulsesync.integrations.delta_folder.exporter import DeltaExporter
from pulsesync.integrations.delta_folder.importer import DeltaImporter

__all__ = ["DeltaExporter", "DeltaImporter", "DeltaVersion"]
