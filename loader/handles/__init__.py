"""Open checkpoints, in the manner of `safetensors.safe_open`: one rank, or whole tensors of all ranks."""
