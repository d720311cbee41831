"""Which reads bring a rank: as stored, at another degree, or sliced out of a plain checkpoint. Imports `checkpoint`."""
