"""Which reads load a rank: as stored, at another degree, or sliced from a plain checkpoint. Start at `checkpoint`."""
