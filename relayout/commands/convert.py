"""`convert`: rewrites a source checkpoint as a folder of rank files."""

from __future__ import annotations

import os
from typing import Unpack

from relayout.conversion.planning import ConvertOptions, PlanOptions, plan_conversion
from relayout.conversion.run import DEFAULT_MEMORY, DEFAULT_THREADS, Summary, carry_out
from relayout.core.arguments import integer, size, takes
from relayout.reporting import Progress


@takes(ConvertOptions, PlanOptions)
def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress = None,
    **options: Unpack[ConvertOptions],
) -> Summary:
    """Rewrite a safetensors checkpoint so that each tensor-parallel rank's bytes are contiguous and aligned.

    Args:
        source: a checkpoint folder, a Hugging Face cache snapshot, a folder of torch DCP, or one .safetensors file.
            Never written to.
        output: the folder to make; default is `SOURCE-tpN` next to the source folder. It appears complete or not at
            all.
        tp: number of tensor-parallel ranks.
        align: power of two, 512 bytes to 16 MiB. Slices of a tensor start at multiples of this alignment if the sizes
            of all of them are multiples of it. Sizes are bytes, or text such as "16KiB".
        plan: a plan file, the name of a built-in plan, or "transformers" for that package's plan; "vllm" or "sglang":
            cut as the classes of that installed engine cut; or the `Plan` of another conversion of this checkpoint.
            Default: the built-in plan for config.json's `model_type`. Not needed for `tp=1`.
        trust_remote_code: with "vllm" or "sglang": allow the engine to run Python files of the source.
        expert_parallel: assign whole experts to ranks, in contiguous blocks. All other tensors are cut as usual.
        unmatched: treatment of tensors that no rule matches: "error", or "replicate" to store them whole for every
            rank, which is the default with the plan of transformers.
        max_part_nbytes: approximate size of files, in bytes; larger ranks are split into several files.
        layout: "ranks": separate files for each rank's slices. "whole": whole tensors, which every stock loader
            reads, and in addition each rank's slices that are not contiguous in them; for a Llama, the output is a
            third larger.
        ranks: write only these ranks, such as range(4) or "0-3", and read only the bytes of the source that they need.
            Default: all.
        force: replace an output folder that relayout wrote, or discard an interrupted conversion that cannot be
            resumed.
        threads: threads that read, copy and write.
        memory: bytes that they may use for copying, or text such as "512MiB".
        scratch: folder for files before their upload to a bucket; default is the system's temporary folder (TMPDIR). It
            needs room for two units: a unit is the files of all ranks with one part number, about `max_part_nbytes` for
            each rank.
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: the source is damaged.
        PlanError: the source cannot be converted with these options.
        OSError: reading or writing failed.

    If the conversion fails or is interrupted after some tensors were written, they are kept in a hidden folder next to
    the output. The same call resumes: it reads the written tensors again, and keeps those with the right digest.

    Example:
        >>> import relayout
        >>> summary = relayout.convert("llama-3.1-8b", "out", tp=8)
        >>> summary.num_ranks, summary.num_files
        (8, 8)
    """
    threads, memory = integer(threads, "threads"), size(memory, "memory")
    planned = plan_conversion(source, output, **options)
    return carry_out(planned, force=force, threads=threads, memory=memory, scratch=scratch, progress=progress)
