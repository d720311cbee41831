"""What takes the place of SGLang's kernels and threads while its classes are built and loaded."""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from types import ModuleType

import pytest
import torch

from relayout.observe import sglang_stubs
from relayout.observe.sglang_stubs import AtOnce, stub_functions, stub_rotary


def raising(_: int) -> int:
    raise KeyError("w13")


def test_what_is_submitted_runs_at_once_in_the_thread_that_submits_it() -> None:
    """SGLang's classes wait for such futures with `as_completed` and `wait`."""
    done = []
    with AtOnce(max_workers=4) as pool:
        futures = [pool.submit(lambda n: done.append((n, threading.get_ident())) or n, n) for n in range(3)]
        assert done == [(n, threading.get_ident()) for n in range(3)]
        failed = pool.submit(raising, 1)
        assert list(pool.map(lambda a, b: a + b, (1, 2), (10, 20, 30))) == [11, 22]
        pool.shutdown(wait=True)
    assert sorted(future.result() for future in concurrent.futures.as_completed(futures)) == [0, 1, 2]
    assert concurrent.futures.wait([*futures, failed]).not_done == set()
    with pytest.raises(KeyError, match="w13"):
        failed.result()


def test_functions_are_replaced_wherever_sglang_has_imported_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_rope(head_size: int, rotary_dim: int) -> None:
        raise RuntimeError("no kernel for it")

    get_rope.__module__ = "sglang.srt.layers.rotary_embedding.factory"
    modules = {}
    for name in (get_rope.__module__, "sglang.srt.models.odd", "other.models"):
        modules[name] = module = ModuleType(name)
        module.get_rope = get_rope  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(concurrent.futures, "ThreadPoolExecutor", concurrent.futures.ThreadPoolExecutor)
    monkeypatch.setattr(torch.nn.Module, "to", torch.nn.Module.to)  # It is replaced, too.
    stub_functions()
    rope = modules["sglang.srt.models.odd"].get_rope(64, rotary_dim=32)
    assert isinstance(rope, torch.nn.Module)
    assert (rope.head_size, rope.rotary_dim) == (64, 32)
    assert list(rope.parameters()) == list(rope.buffers()) == []
    rope.cos_sin_cache.to("cuda")  # It has every attribute.
    assert modules["other.models"].get_rope is get_rope
    assert concurrent.futures.ThreadPoolExecutor is AtOnce


def test_sglang_finds_a_kernel_of_vllm_which_it_imports_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm._custom_ops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # So that it is taken away again.
    stub_rotary()
    from vllm._custom_ops import rotary_embedding

    assert rotary_embedding is None


def test_a_checkpoint_in_nvfp4_has_kernels_and_all_else_is_this_platforms() -> None:
    platform = ModuleType("platform")
    platform.is_blackwell, platform.is_cuda = False, False  # type: ignore[attr-defined]
    stood_in = sglang_stubs._Blackwell(lambda: platform)
    assert stood_in.is_blackwell
    assert not stood_in.is_cuda
