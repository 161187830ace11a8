"""The measurements of a Recorder: which weights a process counts, the copies it keeps, and the counts."""
