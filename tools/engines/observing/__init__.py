"""The laboratory of observed plans: small checkpoints of vLLM's architectures, observed, converted and loaded."""
