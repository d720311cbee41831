"""Who holds what, pure but for reading plan files: families, cuts, quantized forms. Imports `core` and `storage`."""
