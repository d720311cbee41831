"""Read-only stores: web servers, and the Hugging Face hub; and OCI registries."""
