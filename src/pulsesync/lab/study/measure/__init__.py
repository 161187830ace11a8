"""What a Recorder looks with: which weights a process counts, the copies it keeps, and the counts themselves."""
