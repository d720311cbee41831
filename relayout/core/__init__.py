"""Values and arithmetic: dtypes, extents, slices, arguments, digests, workers."""
