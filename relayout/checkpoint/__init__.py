"""Reads checkpoint folders: source checkpoints, config.json, converted checkpoints."""
