"""Finds the reads that load a rank: as stored, at another degree, or of a plain checkpoint. Start at `checkpoint`."""
