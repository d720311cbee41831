"""Engines, and checkpoints that they load."""

from support.engine_fixtures import engine, folders, sglang, vllm, whole

__all__ = ["engine", "folders", "sglang", "vllm", "whole"]
