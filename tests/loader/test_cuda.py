"""Loads into the memory of a real CUDA device, and what only one can show: streams, pinned memory, its allocator."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import flip
from support.loader_fixtures import (
    LITTLE,
    MIB,
    Array,
    cache_in_part,
    child,
    extents,
    forget,
    mlp_model,
    nothing_left_behind,
    whole_tensors,
    write_model,
)
from support.models import as_integers
from support.patience import in_time
from support.steps import CONFIG, assert_is_step, weights_of
from support.trees import content

import relayout
from relayout.errors import FormatError, PlanError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: this has not run on a GPU")

DEVICE = "cuda:0"
STALE = 0xEE
LONG = 200_000_000
"""Cycles of the GPU's clock: about a tenth of a second."""


@pytest.fixture(scope="module", autouse=True)
def awake() -> None:
    """Whatever CUDA opens or allocates when it is first used is there before anything is counted."""
    if torch.cuda.is_available():
        torch.ones(3, device=DEVICE).sum().item()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted: slices of every kind, odd sizes, empty and equal tensors, in several files."""
    folder = tmp_path_factory.mktemp("small")
    relayout.convert(mlp_model(folder / "source"), folder / "out", tp=2, max_part_nbytes=MIB)
    return folder / "out"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted for two ranks, of which each has 96 MiB and some odd bytes: several rounds of all buffers."""
    folder = tmp_path_factory.mktemp("large")
    start = "model.layers.{}.mlp."
    sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for layer in range(8):
        sizes |= {
            (start + "up_proj.weight").format(layer): (torch.bfloat16, (2048 + 2 * layer, 2048)),
            (start + "gate_proj.weight").format(layer): (torch.bfloat16, (2050, 2049)),
            (start + "down_proj.weight").format(layer): (torch.bfloat16, (2048, 2048)),
        }
    relayout.convert(write_model(folder / "source", sizes), folder / "out", tp=2, max_part_nbytes=70 * MIB)
    return folder / "out"


@pytest.fixture(params=["pinned", "gds", "auto"])
def backend(request: pytest.FixtureRequest, small: Path) -> str:
    name: str = request.param
    if name == "gds":
        try:
            relayout.load(small, 0, device=DEVICE, backend="gds")
        except PlanError as error:
            pytest.skip(str(error))
    return name


def rank_files(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(f"model-rank-{rank}-part-*.safetensors"))


def stored_arrays(folder: Path, rank: int) -> dict[str, Array]:
    """A rank's tensors by the stock package, on the host, as integers."""
    return {name: as_integers(tensor) for name, tensor in whole_tensors(folder, f"model-rank-{rank}-*").items()}


def assert_on_device(found: dict[str, torch.Tensor], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.device == torch.device(DEVICE), name
        np.testing.assert_array_equal(as_integers(tensor.detach().cpu()), expected[name], err_msg=name)


def poison(nbytes: int) -> None:
    """Fill memory that the allocator will hand out again, so that what an earlier load left there is right no more."""
    torch.full((nbytes,), STALE, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()


@pytest.fixture(params=["cold", "in part", "warm"])
def cache(request: pytest.FixtureRequest, small: Path, large: Path) -> str:
    """How much of the files is in the page cache."""
    for file in (file for folder in (small, large) for rank in range(2) for file in rank_files(folder, rank)):
        if request.param == "warm":
            file.read_bytes()
        elif request.param == "cold":
            forget(file)
        else:
            cache_in_part(file)
    name: str = request.param
    return name


def test_a_rank_is_equal_to_the_stored_bytes(small: Path, large: Path, backend: str, cache: str) -> None:
    for folder in (small, large):
        for rank in range(2):
            poison(128 * MIB)
            before = torch.cuda.memory_allocated()
            with nothing_left_behind():
                held = relayout.load(folder, rank, device=DEVICE, backend=backend)
            assert torch.cuda.memory_allocated() - before <= sum(tensor.nbytes for tensor in held.values()) + MIB
            assert {tensor.data_ptr() % 16 for tensor in held.values() if tensor.numel()} == {0}
            assert len({tensor.untyped_storage().data_ptr() for tensor in held.values()}) == 1
            assert_on_device(held, stored_arrays(folder, rank))
            del held
            assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)])
@pytest.mark.parametrize("name", ["direct", "buffered"])
def test_host_backends_load_to_a_device_as_well(small: Path, name: str, device: Any) -> None:
    poison(16 * MIB)
    held = relayout.load(small, 1, device=device, backend=name)
    assert_on_device(held, stored_arrays(small, 1))
    assert_on_device(dict(relayout.iter_load(small, 1, device=device, backend=name)), stored_arrays(small, 1))


@pytest.mark.filterwarnings("ignore:.*plain checkpoint")
def test_a_plain_folder_is_cut_on_the_way_to_the_device(large: Path, backend: str) -> None:
    """Columns are rows of small pieces with gaps: strided copies."""
    for rank in range(2):
        poison(128 * MIB)
        held = relayout.load(large.parent / "source", rank, tp=2, device=DEVICE, backend=backend, memory=8 * MIB)
        assert_on_device(held, stored_arrays(large, rank))
        del held


@pytest.mark.parametrize("options", [{}, {"threads": 3}, {"threads": 1, "verify": True}])
def test_iter_load_yields_the_stored_bytes_in_file_order(
    small: Path, large: Path, backend: str, options: dict[str, Any]
) -> None:
    for folder, memory in ((small, LITTLE), (large, 24 * MIB)):
        poison(128 * MIB)
        expected = stored_arrays(folder, 0)
        limit = {"memory": memory} if "threads" in options else {}
        with nothing_left_behind():
            found = dict(relayout.iter_load(folder, 0, device=DEVICE, backend=backend, **options, **limit))
        assert list(found) == list(expected)
        assert_on_device(found, expected)
        del found


@pytest.mark.parametrize("pause", [0, LONG // 10])
def test_iter_load_uses_memory_again_only_after_what_the_stream_does_with_it(
    large: Path, backend: str, pause: int
) -> None:
    """The consumer enqueues copies behind a long kernel and drops each tensor at once."""
    expected = stored_arrays(large, 1)
    stream = torch.cuda.Stream()
    copies = {}
    with torch.cuda.stream(stream):
        for name, tensor in relayout.iter_load(large, 1, device=DEVICE, backend=backend, memory=24 * MIB):
            torch.cuda._sleep(pause)
            copies[name] = tensor.clone()
            del tensor
    stream.synchronize()
    assert_on_device(copies, expected)


@pytest.mark.parametrize("count", [1, 7])
def test_an_iterator_that_is_left_gives_everything_back(large: Path, backend: str, count: int) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    with nothing_left_behind():
        iterator: Any = relayout.iter_load(large, 0, device=DEVICE, backend=backend, memory=24 * MIB)
        kept = dict(next(iterator) for _ in range(count))
        in_time(iterator.close)
        del iterator
    expected = stored_arrays(large, 0)
    assert_on_device(kept, {name: expected[name] for name in list(expected)[:count]})
    kept.clear()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("stream", ["default", "other"])
def test_what_the_current_stream_does_next_sees_every_byte(large: Path, backend: str, stream: str) -> None:
    """Copies are enqueued the moment that the load returns, on the stream that was current, and looked at later."""
    expected = [stored_arrays(large, rank) for rank in range(2)]
    current = torch.cuda.Stream() if stream == "other" else torch.cuda.default_stream()
    for repeat in range(6):
        with torch.cuda.stream(current):
            # The same allocation again, but not with the same bytes.
            poison(128 * MIB)
            held = relayout.load(large, repeat % 2, device=DEVICE, backend=backend, threads=4, memory=64 * MIB)
            copies = {name: tensor.clone() for name, tensor in held.items()}
        current.synchronize()
        assert_on_device(copies, expected[repeat % 2])
        del held, copies


def test_memory_that_kernels_still_use_is_not_written_to(large: Path, backend: str) -> None:
    """The allocator hands a block out again as soon as it is dropped; its last reader may not have run yet."""
    nbytes = sum(array.nbytes for array in stored_arrays(large, 0).values())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda.empty_cache()
        num_reused = 0
        for _ in range(3):
            block = torch.full((nbytes + MIB,), 7, dtype=torch.uint8, device=DEVICE)
            torch.cuda._sleep(LONG)
            copy = block.clone()
            address = block.data_ptr()
            del block
            held = relayout.load(large, 0, device=DEVICE, backend=backend)
            assert bool((copy == 7).all())
            assert_on_device(held, stored_arrays(large, 0))
            num_reused += next(iter(held.values())).untyped_storage().data_ptr() == address
            del held, copy
    assert num_reused, "the block was not handed out again, so this shows nothing"


def test_into_fills_what_is_given_and_nothing_around(small: Path, backend: str) -> None:
    guard = 64
    stored = whole_tensors(small, "model-rank-1-*")
    for odd in (False, True):
        memory, into, host = {}, {}, {}
        for number, (name, tensor) in enumerate(stored.items()):
            fused = tensor.dim() == 2 and number % 3 == 0
            shape = (tensor.shape[0], 3 * tensor.shape[1]) if fused else tuple(tensor.shape)
            skip = guard + (tensor.element_size() if odd else 0)
            nbytes = int(np.prod(shape)) * tensor.element_size()
            space = np.full(nbytes + 2 * guard + 8, STALE, np.uint8)
            memory[name] = torch.from_numpy(space).to(DEVICE)
            host[name] = torch.from_numpy(space)
            views = [one[skip : skip + nbytes].view(tensor.dtype).view(shape) for one in (memory[name], host[name])]
            if fused:
                views = [view.narrow(1, tensor.shape[1], tensor.shape[1]) for view in views]
            into[name] = views[0]
            views[1].copy_(tensor)
        with nothing_left_behind():
            device = DEVICE if odd else "cuda"  # Without a number, too.
            found = relayout.load(small, 1, device=device, backend=backend, into=into, verify=True)
        assert all(found[name] is into[name] for name in stored)
        for name in stored:
            np.testing.assert_array_equal(memory[name].cpu().numpy(), host[name].numpy(), err_msg=name)


def test_verify_finds_a_flipped_bit(large: Path, backend: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(large, tmp_path / "copy"))
    assert relayout.load(folder, 1, device=DEVICE, backend=backend, verify=True)
    for number, file in enumerate(rank_files(folder, 1)):
        for start, end in list(extents(file).values())[::3]:
            position = (start, (start + end) // 2, end - 1)[number % 3]
            flip(file, position, number % 8)
            forget(file)
            with nothing_left_behind(), pytest.raises(FormatError, match=rf"{file.name}: bytes \d+ to \d+ do not"):
                relayout.load(folder, 1, device=DEVICE, backend=backend, verify=True)
            flip(file, position, number % 8)
    forget(*rank_files(folder, 1))
    assert_on_device(relayout.load(folder, 1, device=DEVICE, backend=backend, verify=True), stored_arrays(folder, 1))


def test_an_error_leaves_nothing_and_the_next_load_is_right(large: Path, backend: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(large, tmp_path / "copy"))
    gc.collect()
    before = torch.cuda.memory_allocated()
    file = rank_files(folder, 0)[-1]
    iterator = relayout.iter_load(folder, 0, device=DEVICE, backend=backend, memory=24 * MIB)
    with nothing_left_behind():
        next(iterator)
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises((FormatError, OSError), match=file.name):
            in_time(lambda: list(iterator))
        with pytest.raises(FormatError, match=rf"{file.name}: \d+ bytes long, expected \d+"):
            relayout.load(folder, 0, device=DEVICE, backend=backend)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert_on_device(relayout.load(large, 0, device=DEVICE, backend=backend), stored_arrays(large, 0))


def test_pinned_memory_stays_within_the_budget_and_does_not_grow(large: Path, backend: str) -> None:
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this torch does not tell how much memory is pinned")
    pinned = "allocated_bytes.current"  # What torch says is active grows with each block that is used again (2.11).
    memory = 32 * MIB
    before = torch.cuda.host_memory_stats()
    seen = []
    for repeat in range(20):
        held = relayout.load(large, repeat % 2, device=DEVICE, backend=backend, threads=4, memory=memory)
        torch.cuda.synchronize()
        seen.append(torch.cuda.host_memory_stats().get(pinned, 0))
        del held
    assert max(seen[2:]) == seen[2]
    assert max(seen) - before.get(pinned, 0) <= memory


def test_a_program_that_loads_exits(large: Path, backend: str) -> None:
    """With everything still alive when the interpreter is taken down."""
    script = """
import sys, relayout
held = relayout.load(sys.argv[1], 0, device="cuda:0", backend=sys.argv[2])
left = relayout.iter_load(sys.argv[1], 1, device="cuda:0", backend=sys.argv[2], memory=24 * 2**20)
first = next(left)
print(len(held))
"""
    assert child(script, large, backend) == 24


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["as it is", "cast"])
@pytest.mark.parametrize("background", [False, True], ids=["at once", "behind"])
def test_a_save_from_the_device_is_that_from_the_host(tmp_path: Path, dtype: Any, background: bool) -> None:
    """Tensors that are turned, cut and tied as well."""
    host = weights_of(3)
    on_device = {name: tensor.to(DEVICE) for name, tensor in host.items()}
    turned = "model.layers.0.mlp.up_proj.weight"
    on_device[turned] = on_device[turned].t().contiguous().t()
    options: dict[str, Any] = {"config": CONFIG, "tp": 2, "dtype": dtype}
    relayout.save(host, tmp_path / "host", **options)
    saving = relayout.save(on_device, tmp_path / "device", background=background, **options)
    if background:
        for tensor in on_device.values():
            tensor.zero_()
        saving.result()  # type: ignore[union-attr]
    assert content(tmp_path / "device") == content(tmp_path / "host")


def test_steps_published_from_the_device_are_followed(tmp_path: Path) -> None:
    publisher = relayout.Publisher(tmp_path / "steps", config=CONFIG, tp=2)
    follower = relayout.Follower(tmp_path / "steps", 1)
    for step in range(1, 4):
        published = publisher.publish({name: tensor.to(DEVICE) for name, tensor in weights_of(step).items()}, step)
        assert (published.full is None) is (step > 1)
        assert follower.update() == step
        assert_is_step(follower.tensors, weights_of(step), 1)
