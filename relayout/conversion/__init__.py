"""Turns a plan into bytes on the drive: layout, copy steps, staging, resumption."""
