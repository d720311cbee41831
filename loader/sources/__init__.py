"""Sources of the reads of a rank: as stored, at another degree, or of a plain checkpoint. Start at `checkpoint`."""
