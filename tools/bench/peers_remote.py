"""The peers of `tools/run bench remote`: each loads a rank from S3 into host memory, in memory of the rank's own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from relayout.benchmark.job import Job, Loader

if TYPE_CHECKING:
    from relayout.benchmark.job import Tensors


def relayout(job: Job) -> Tensors:
    """relayout.load of the converted prefix: the rank's own bytes."""
    from relayout.loader import load

    return load(job.converted, job.rank)


def runai(job: Job) -> Tensors:
    """Run:ai Model Streamer on the plain checkpoint, of which each tensor is cut and its part copied."""
    from runai_model_streamer import SafetensorsStreamer

    os.environ["RUNAI_STREAMER_S3_ENDPOINT"] = os.environ["AWS_ENDPOINT_URL"]
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(_objects(job), owned=False)
        return {name: job.owned(name, tensor) for name, tensor in streamer.get_tensors()}


def s3fs(job: Job) -> Tensors:
    """s3fs reads each file of the plain checkpoint whole, safetensors takes it apart, and parts are copied."""
    from safetensors.torch import load

    found = {}
    for name in _objects(job):
        found |= {key: job.owned(key, tensor) for key, tensor in load(_file_system().cat_file(name)).items()}
    return found


def _objects(job: Job) -> list[str]:
    return [f"s3://{name}" for name in _file_system().ls(job.source) if name.endswith(".safetensors")]


def _file_system():  # type: ignore[no-untyped-def]
    import s3fs

    return s3fs.S3FileSystem()


_RUNAI = {
    "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    # A server that shares two cores with its clients answers late; without these, loads fail.
    "RUNAI_STREAMER_S3_TIMEOUT": "60000",
    "AWS_MAX_ATTEMPTS": "10",
}

REMOTE_PEERS = {
    "relayout": Loader(relayout, "relayout", "relayout", ("relayout.loader", "obstore"), reads_converted=True),
    "runai": Loader(runai, "Run:ai Model Streamer", "Run:ai", ("runai_model_streamer", "s3fs"), _RUNAI),
    "s3fs": Loader(s3fs, "s3fs + safetensors", "s3fs", ("s3fs", "safetensors.torch")),
}
