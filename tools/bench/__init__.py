"""Benchmarks: conversion and loading beside their peers and the drive's own limit, as ratios within one run.

`tools/run bench --help`. Peers that are to take part are installed beside relayout: pip install '.[bench]'; on a GPU
also: pip install instanttensor
"""
