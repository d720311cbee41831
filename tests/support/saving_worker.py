"""Four processes that save together, one case after the other.

`main` with `FOLDER URL` in sys.argv: FOLDER has a checkpoint of each of `NAMES`; each case makes a folder CASE there,
one of them URL, and each process writes the errors that it saw to member-N.json. `of_models` with `FOLDER` does so with
models of transformers.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.group_worker import NUM_MEMBERS, forked, join
from support.profile import sample

NAMES = ("llama", "qwen3_moe", "phi3")
"""Families: dense; experts; fused query, key and value."""
SHARD = "300KB"
CASE_SECONDS = 60
"""The most that a case may take; it takes one."""


def main() -> None:
    codes = forked(partial(_member, Path(sys.argv[1]), sys.argv[2]))
    assert codes == [0, 0, 0, -signal.SIGKILL], codes


def of_models() -> None:
    import torch.distributed.fsdp  # noqa: F401 (once, before the members are forked)

    codes = forked(partial(_saves_models, Path(sys.argv[1])))
    assert codes == [0] * NUM_MEMBERS, codes


def of_stages() -> None:
    """`FOLDER`: each process has one of two layers, and saves it as if it were the model."""
    codes = forked(partial(_saves_a_stage, Path(sys.argv[1])))
    assert codes == [0] * NUM_MEMBERS, codes


def killed() -> None:
    """`FOLDER MEMBER CALLS`: all save FOLDER/llama, and MEMBER (-1: every process) is killed after so many calls."""
    folder, member, num_calls = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    codes = forked(partial(_is_killed, folder, member, num_calls))
    assert any(codes) or (folder / "out").exists(), codes
    print(codes)


def _is_killed(folder: Path, member: int, num_calls: int, number: int) -> None:
    import torch.distributed as dist

    import relayout

    join(folder, number)
    whole = tensors_of(folder / "llama")
    if member in (number, -1):
        kill_after(num_calls)
    options: dict[str, Any] = {"config": folder / "llama", "max_part_nbytes": "30KB", "threads": 1, "force": True}
    relayout.save(whole, folder / "out", tp=8, group=dist.group.WORLD, **options)


def one_is_missing() -> None:
    """`FOLDER`: groups with a short timeout, of which the members 1 and 2 do not always call."""
    codes = forked(partial(_one_is_missing, Path(sys.argv[1])))
    assert codes == [0] * NUM_MEMBERS, codes


def _one_is_missing(folder: Path, number: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import constants

    import relayout
    from relayout.loader.group import collectives

    collectives._QUIET_SECONDS = 0.2
    join(folder, number)
    seen, limit = Seen(folder, number), timedelta(seconds=3)
    groups = [dist.new_group(range(NUM_MEMBERS), timeout=limit) for _ in range(2)]
    constants.default_pg_timeout = limit

    def case(name: str, group: Any) -> None:
        options: dict[str, Any] = {"config": {"model_type": "llama"}, "tp": 1, "force": True, "group": group}
        seen.case(name, lambda: relayout.save({"model.norm.weight": torch.ones(4)}, folder / "out", **options))

    case("all call", groups[0])
    if number in (1, 2):
        time.sleep(10)
    else:
        case("the next", groups[0])
        case("the first", groups[1])


def connecting() -> None:
    """`FOLDER`: members have little time to connect; one is late, and later killed when it is about to connect."""
    codes = forked(partial(_connecting, Path(sys.argv[1])))
    assert codes == [0, 0, -signal.SIGKILL, 0], codes


def _connecting(folder: Path, number: int) -> None:
    import torch
    import torch.distributed as dist

    import relayout
    from relayout.loader.group import collectives

    collectives._QUIET_SECONDS, collectives._CONNECT_SECONDS = 0.2, 2.0
    join(folder, number)
    seen, groups = Seen(folder, number), [dist.new_group(range(NUM_MEMBERS)) for _ in range(3)]
    options: dict[str, Any] = {"config": {"model_type": "llama"}, "tp": 1, "force": True}

    def case(name: str, group: Any) -> None:
        time.sleep(4 * (number == 1 and name.startswith("late")))
        save = partial(relayout.save, {"model.norm.weight": torch.ones(4)}, folder / "out", group=group, **options)
        seen.case(name, save)

    case("late for the first", groups[0])
    case("late for the next", groups[0])
    if number == 2:
        dist.new_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    case("killed", groups[1])
    case("gone", groups[2])


def stopped() -> None:
    """`FOLDER`: member 2 stops in the middle of a save, and goes on when member 0's log has named it."""
    codes = forked(partial(_is_stopped, Path(sys.argv[1])))
    assert codes == [0] * NUM_MEMBERS, codes


def _is_stopped(folder: Path, number: int) -> None:
    import torch
    import torch.distributed as dist

    import relayout
    from relayout.loader.group import collectives
    from relayout.train import group_save

    def go_on() -> None:
        os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)

    class Continue(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            (folder / "said").write_text(record.getMessage())
            go_on()

    collectives._QUIET_SECONDS = 0.5
    join(folder, number)
    run_unit = group_save.run_unit

    def stop(*args: Any, **options: Any) -> Any:
        (folder / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return run_unit(*args, **options)

    if number == 2:
        group_save.run_unit = stop
    if number == 0:
        logging.getLogger("relayout").addHandler(Continue())
        threading.Timer(CASE_SECONDS - 10, go_on).start()
    options: dict[str, Any] = {"config": {"model_type": "llama"}, "tp": 4, "group": dist.group.WORLD}
    tensors = {"model.norm.weight": torch.ones(4)}
    Seen(folder, number).case("stopped", lambda: relayout.save(tensors, folder / "out", **options))


def models() -> list[str]:
    return sample(("llama", "tied", "qwen3_moe", "phi3", "gpt_oss"), ("tied", "qwen3_moe"))


def tensors_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


class Seen:
    """The errors that this process saw, by case; also in its file."""

    def __init__(self, folder: Path, number: int) -> None:
        self._file = folder / f"member-{number}.json"
        self._cases: dict[str, Any] = {}

    def case(self, name: str, save: Callable[[], object]) -> None:
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)  # One that hangs says where, and fails soon.
        try:
            save()
            self._cases[name] = None
        except (Exception, KeyboardInterrupt) as error:
            self._cases[name] = [type(error).__name__, str(error)]
        faulthandler.cancel_dump_traceback_later()
        self._file.write_text(json.dumps(self._cases))


def _member(folder: Path, url: str, number: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
    from torch.distributed.tensor.placement_types import _StridedShard

    import relayout

    join(folder, number)
    world, held = dist.group.WORLD, "relayout.loader.held.HeldTensor"
    line, square = init_device_mesh("cpu", (NUM_MEMBERS,)), init_device_mesh("cpu", (2, 2))
    seen = Seen(folder, number)

    def save(case: str, tensors: dict[str, Any], name: str = "llama", tp: int = 4, **options: Any) -> Callable[[], Any]:
        options = {"config": folder / name, "group": world, "memory": "16MiB", "max_shard_size": SHARD, **options}
        return lambda: relayout.save(tensors, folder / case, tp=tp, **options)

    def two_axes(name: str, tensor: Any) -> Any:
        rows = Shard(1) if any(part in name for part in ("o_proj", "down_proj")) else Shard(0)
        return distribute_tensor(tensor, square, [Shard(0), Replicate() if tensor.dim() == 1 else rows])

    for name in NAMES:
        parts = {key: two_axes(key, tensor) for key, tensor in tensors_of(folder / name).items()}
        seen.case(f"{name}-fsdp-tp", save(f"{name}-fsdp-tp", parts, name, tp=2))
    whole = tensors_of(folder / "llama")
    parts = {key: distribute_tensor(tensor, line, [Shard(0)]) for key, tensor in whole.items()}
    seen.case("fsdp", save("fsdp", parts))
    mine = {key: tensor for index, (key, tensor) in enumerate(whole.items()) if index * 4 // len(whole) == number}
    seen.case("pipeline", save("pipeline", mine))
    pairs = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    of_pairs = {}
    for index, (key, tensor) in enumerate(whole.items()):
        half = tensor.chunk(2)[number % 2] if number // 2 == index % 2 else tensor[:0]
        place = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
        of_pairs[key] = DTensor.from_local(half, pairs[index % 2], [Shard(0)], **place)
    seen.case("pairs", save("pairs", of_pairs))
    seen.case("replicas", save("replicas", whole, tp=8))
    seen.case("one-rank", save("one-rank", parts, tp=1))
    seen.case("again", save("one-rank", parts, tp=1))
    changing = {key: distribute_tensor(tensor.clone(), line, [Shard(0)]) for key, tensor in whole.items()}
    later = save("background", changing, background=True)()
    for tensor in changing.values():
        tensor.to_local().zero_()
    behind = save("behind", parts)
    seen.case("behind", behind)
    seen.case("background", later.result)
    some = {key: tensor for key, tensor in parts.items() if number != 1 or "layers.0" not in key}
    seen.case("missing", save("missing", some))
    seen.case("alone", save("alone", parts, group=None))
    seen.case("options", save("options", parts, tp=2 if number == 2 else 4))
    seen.case("outputs", save("outputs" if number == 2 else "others", parts))
    other = {**whole, "model.norm.weight": whole["model.norm.weight"].float()} if number == 3 else whole
    seen.case("dtypes", save("dtypes", other))
    sum_of = DTensor.from_local(whole["model.norm.weight"], line, [Partial()])
    sums = {**parts, "model.norm.weight": sum_of if number == 1 else whole["model.norm.weight"]}
    seen.case("sums", save("sums", sums))

    def appear(done: int, total: int) -> None:
        if not (folder / "appears").exists():
            shutil.copytree(folder / "one-rank", folder / "appears")

    seen.case("appears", save("appears", parts, progress=appear))
    with _failing("os.pwrite", OSError(errno.ENOSPC, "No space left on device"), number == 2):
        seen.case("full", save("full", parts))
    with patch("relayout.train.group_save.needed_for", return_value=(2**60, 2**60)) if number == 0 else nullcontext():
        seen.case("space", save("space", parts))
    seen.case("after", save("full", parts))
    seen.case("layout", save("whole", parts, layout="whole"))
    seen.case("ranks", save("whole", parts, ranks="1-2"))
    missing = folder / "nothing"
    seen.case("config", save("config", parts, config=missing if number == 0 else folder / "llama"))
    seen.case("config-of-one", save("config-of-one", parts, config=folder / "llama" if number == 0 else missing))
    # As many elements as the tensor has, but not all of them: rows 0 to 4, 2 to 4, and 4 to 6 of 8.
    eight = torch.arange(8.0)
    halves = distribute_tensor(eight, square, [Shard(0), Replicate()])
    quarters = distribute_tensor(eight, line, [Shard(0)])
    seen.case("overlap", save("overlap", [{"x": halves}, {"x": quarters}, {"x": quarters}, {}][number]))
    drifted = {"x": DTensor.from_local(eight[:4].clone() + (number == 3), square, [Replicate(), Shard(0)])}
    seen.case("drift", save("drift", drifted, unmatched="replicate"))
    buffer = eight + (number == 2)
    seen.case("buffer", save("buffer", {**parts, "x": buffer}, unmatched="replicate"))
    seen.case("part", save("part", {"x": eight if number == 0 else halves}, unmatched="replicate"))
    pieces = eight.reshape(4, 2)[number // 2 :: 2].reshape(-1)
    both = [_StridedShard(0, split_factor=2), Replicate()]
    place = {"shape": eight.shape, "stride": eight.stride(), "run_check": False}
    of_pieces = {"x": DTensor.from_local(pieces, square, both, **place)}
    seen.case("strided", save("strided", of_pieces, unmatched="replicate"))
    other_order = distribute_tensor(eight, square, [Shard(0), Shard(0)])
    other_order._spec.shard_order = (ShardOrderEntry(0, (1, 0)),)
    seen.case("order", save("order", {"x": other_order}))
    seen.case("shape", save("shape", {"x": DTensor.from_local(eight[:3], line, [Shard(0)], **place)}))
    layers = {f"layers.{n}.x": distribute_tensor(torch.arange(4.0 * n), line, [Shard(0)]) for n in (1, 2, 10)}
    seen.case("numbers", save("numbers", layers, unmatched="replicate"))
    embedding = distribute_tensor(torch.arange(12.0).reshape(3, 4), line, [Shard(0)])  # Of which one member has no row.
    config = {"tie_word_embeddings": True, "vocab_size": 3} if number == 0 else None
    for case, background in (("tied", False), ("tied-copies", True)):
        done = save(
            case, {"embedding": embedding, "head": embedding.detach()}, config=config, background=background, tp=1
        )
        seen.case(case, (lambda later: later.result)(done()) if background else done)
    with _failing(f"{held}.copy", RuntimeError("the device is on fire"), number == 1):
        seen.case("copy", save("copy", parts, tp=1))  # This member only sends.
    with _failing("relayout.publish.output.LocalOutput.keep", OSError(errno.EIO, "the drive is on fire"), number == 0):
        seen.case("notes", save("notes", parts))
    with _failing(f"{held}.on_host", KeyboardInterrupt(), number == 2):
        seen.case("interrupted", lambda: save("interrupted", parts, background=True)().result())
    seen.case("store", lambda: relayout.save(parts, url, tp=4, config=folder / "llama", group=world))
    if number == 3:
        kill_after(0)
    seen.case("killed", save("killed", parts))


def _failing(name: str, error: BaseException, is_me: bool) -> AbstractContextManager[object]:
    """A function or method that fails, in one member."""
    return patch(name, side_effect=error) if is_me else nullcontext()


def kill_after(num_calls: int, calls: Sequence[str] = ("pwrite", "fsync")) -> None:
    """Kill this process at a call that writes, or brings to the drive what was written; or at another call of `os`."""
    num_left = num_calls

    def mortal(true: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return true(*given, **options)

        return call

    for name in calls:
        setattr(os, name, mortal(getattr(os, name)))


def model_of(name: str) -> Any:
    """A small model with random weights, the same in every process."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 500,
    }
    experts = {"num_experts_per_tok": 2, "head_dim": 16}
    kinds: dict[str, Callable[[], Any]] = {
        "llama": lambda: hf.LlamaConfig(**sizes),
        "tied": lambda: hf.LlamaConfig(**sizes, tie_word_embeddings=True),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(**sizes, **experts, num_experts=8, moe_intermediate_size=64),
        "phi3": lambda: hf.Phi3Config(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=1),
        "gpt_oss": lambda: hf.GptOssConfig(**sizes, **experts, num_local_experts=8),
    }
    model = hf.AutoModelForCausalLM.from_config(kinds[name]()).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def _saves_models(folder: Path, number: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import relayout

    join(folder, number)
    mesh = init_device_mesh("cpu", (NUM_MEMBERS,))
    seen = Seen(folder, number)
    for name in models():
        model = model_of(name)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        seen.case(
            name,
            partial(relayout.transformers.save_pretrained, model, folder / f"{name}-saved", tp=4, max_shard_size=SHARD),
        )


def _saves_a_stage(folder: Path, number: int) -> None:
    import torch

    import relayout

    join(folder, number)
    model = model_of("llama")
    model.model.layers[1 - min(number, 1)] = torch.nn.Identity()
    Seen(folder, number).case("stage", partial(relayout.transformers.save_pretrained, model, folder / "out", tp=2))
