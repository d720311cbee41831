"""Rules that assign slices of tensors to ranks: families, cuts, quantization. Pure except for reading plan files."""
