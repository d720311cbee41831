"""Engines, and checkpoints that they load."""

from support.engine_fixtures import engine, folders, vllm, whole

__all__ = ["engine", "folders", "vllm", "whole"]
