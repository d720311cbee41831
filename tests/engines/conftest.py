"""Engines, and checkpoints that they load."""

from support.engine_fixtures import conversions_end, engine, folders, sglang, tokenspeed, vllm, whole

__all__ = ["conversions_end", "engine", "folders", "sglang", "tokenspeed", "vllm", "whole"]
