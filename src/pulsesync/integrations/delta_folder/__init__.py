"""Export a run as the delta folders of slime, miles and stitch, and import such folders as a run; both bit for bit.

    with DeltaExporter("s3://bucket/run", "updates") as exporter:
        exporter.update()              # updates/weight_v000004 is a checkpoint, weight_v000005 what changed since, …

    with DeltaImporter("updates", "s3://bucket/run", base="Qwen3-8B") as importer:
        importer.update()              # publishes a version for the base and for every folder

`deltas` describes the folders. A folder appears completely or not at all: it is written under another name and renamed
when all of it is on the disk. Run either again to continue after an interruption, or when there are new versions.
"""

from pulsesync.integrations.delta_folder.deltas import DeltaVersion
from pulsesync.integrations.delta_folder.exporter import DeltaExporter
from pulsesync.integrations.delta_folder.importer import DeltaImporter

__all__ = ["DeltaExporter", "DeltaImporter", "DeltaVersion"]
