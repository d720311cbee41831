"""Values and arithmetic: dtypes, extents, slices, name patterns, workers."""
