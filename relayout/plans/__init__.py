"""Which rank holds what: families, cuts, quantization. Pure except reading plan files."""
