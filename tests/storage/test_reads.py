"""What becomes of calls whose reads fail, or bring bytes of another version: on a store whose requests can fail."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from support.patience import PATIENCE
from support.toy_store import Fault, Shelf, shelf

import relayout
from relayout.conversion.consistency import Verification
from relayout.errors import FormatError

MIB = 2**20
TENSORS = {
    f"layers.{index}.weight": np.random.default_rng(index).integers(0, 256, MIB + index, np.uint8) for index in range(8)
}


def broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO), "toy://lost")


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Shelf]:
    """A shelf with a model and its conversion."""
    models = shelf(tmp_path.name)
    models.write("model/model.safetensors", save(TENSORS, {"format": "pt"}))
    models.write("model/config.json", b'{"model_type": "x"}')
    relayout.convert(f"{models.root}/model", f"{models.root}/out")
    models.log.clear()
    yield models
    models.clear()


CALLS: dict[str, Callable[[str], object]] = {
    "load": lambda root: relayout.load(f"{root}/out", 0),
    "load plain": lambda root: relayout.load(f"{root}/model", 0, tp=1),
    "load proved": lambda root: relayout.load(f"{root}/out", 0, verify=True),
    "iter_load": lambda root: list(relayout.iter_load(f"{root}/out", 0, memory=8 * MIB)),
    "open": lambda root: relayout.open(f"{root}/out", 0).get_tensor("layers.3.weight"),
    "safe_open": lambda root: relayout.safe_open(f"{root}/out").get_tensor("layers.3.weight"),
    "verify": lambda root: relayout.verify(f"{root}/out"),
    "verify source": lambda root: relayout.verify(f"{root}/out", source=f"{root}/model"),
    "restore": lambda root: relayout.restore(f"{root}/out", f"{root}/back"),
    "convert": lambda root: relayout.convert(f"{root}/model", f"{root}/again"),
}


AFTER = {"convert": 4, "load plain": 4, "verify source": 4, "verify": 3}
"""Reads of weights that pass: those of headers, of which a file with an error is one with damage."""


def refused(result: object) -> object:
    """`verify` does not stop at what it finds."""
    if isinstance(result, Verification) and not result.ok:
        raise FormatError(result.differences[0].what)
    return result


def visible(models: Shelf) -> list[str]:
    return [name for name in models.names() if not name.startswith(".") and "/.relayout/" not in name]


@pytest.mark.parametrize("name", CALLS)
def test_a_read_that_fails_is_the_error_of_the_call_and_the_next_call_works(models: Shelf, name: str) -> None:
    fault = Fault("read", "*/*.safetensors", after=AFTER.get(name, 1), error=broken)
    before = visible(models)
    models.faults.append(fault)
    with pytest.raises(OSError, match="Input/output error") as caught:
        CALLS[name](models.root)
    assert fault.num_struck == 1
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "toy://lost")
    assert visible(models) == before, "nothing was published"
    CALLS[name](models.root)


@pytest.mark.parametrize("name", CALLS)
def test_an_object_that_is_replaced_while_it_is_read_is_an_error_and_never_mixed_in(models: Shelf, name: str) -> None:
    folder = "model" if name in ("convert", "load plain", "verify source") else "out"
    victim = next(file for file in models.names(f"{folder}/") if file.endswith(".safetensors"))
    other = models.objects[victim][0][::-1]
    fault = Fault("read", victim, after=3 if name == "verify" else 1, act=lambda: models.write(victim, other))
    models.faults.append(fault)
    before = visible(models)
    with pytest.raises(FormatError, match=r"was replaced while it was read|has changed since it was last checked"):
        refused(CALLS[name](models.root))
    assert fault.num_struck == 1
    assert visible(models) == before


def test_requests_are_under_way_together(models: Shelf) -> None:
    relayout.load(f"{models.root}/model", 0, tp=1)
    num_reads, together = models.requests["read"], threading.Barrier(2)
    last_ones = Fault("read", "*", after=num_reads - 2, act=lambda: together.wait(PATIENCE), times=2)
    models.faults.append(last_ones)
    loaded = relayout.load(f"{models.root}/model", 0, tp=1, threads=8)
    assert not together.broken
    assert {name: tensor.numpy().tobytes() for name, tensor in loaded.items()} == {
        name: array.tobytes() for name, array in TENSORS.items()
    }


def test_tensors_of_two_loads_share_no_memory_with_the_store(models: Shelf) -> None:
    first, second = (relayout.load(f"{models.root}/out", 0)["layers.0.weight"] for _ in range(2))
    first.zero_()
    assert not torch.equal(first, second)
    assert relayout.verify(f"{models.root}/out").ok
