"""`convert`: a source checkpoint in, a folder of rank files out."""

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
        source: a checkpoint folder, a Hugging Face cache snapshot, or one .safetensors file. Never written to.
        output: the folder to make; default is `SOURCE-tpN` beside the source folder. It appears complete or not at all.
        tp: number of tensor-parallel ranks.
        align: power of two, 512 bytes to 16 MiB; tensors whose slices are all multiples of it start at multiples of
            it. Sizes are bytes, or text such as "16KiB".
        plan: a plan file, the name of a built-in plan, "transformers" for that package's plan, or "vllm" or "sglang":
            cut as the classes of that installed engine cut; or the `Plan` of another conversion of this checkpoint.
            Default is the built-in plan for config.json's `model_type`. Not needed for `tp=1`.
        trust_remote_code: with "vllm" or "sglang": let it run Python files of the source.
        expert_parallel: assign whole experts to ranks, in contiguous blocks; all other tensors are cut as without.
        unmatched: what to do with tensors that no rule matches: "error", or "replicate" to store them whole for every
            rank, which is the default with the plan of transformers.
        max_part_nbytes: a rank is split into files of about this many bytes.
        layout: "ranks": separate files for each rank's slices. "whole": whole tensors, which every stock loader reads,
            and each rank's slices that are not contiguous in them; a third larger for a Llama.
        ranks: write only these ranks, such as range(4) or "0-3", and read only what they need of the source.
            Default: all.
        force: replace an output folder that relayout wrote, or discard an interrupted conversion that cannot be
            resumed.
        threads: threads that read, copy and write.
        memory: bytes that they may use for copying, also as text, such as "512MiB".
        scratch: the folder for files on their way to a bucket; default is that of temporary files (TMPDIR). It needs
            room for two units: all files of one number, of about `max_part_nbytes` for each rank.
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: the source is damaged.
        PlanError: it cannot be converted like this.
        OSError: reading or writing failed.

    If it fails or is interrupted after some tensors were written, they stay in a hidden folder beside the output. The
    same call resumes: it reads the written tensors again, and keeps those with the right digest.

    Example:
        >>> import relayout
        >>> summary = relayout.convert("llama-3.1-8b", "out", tp=8)
        >>> summary.num_ranks, summary.num_files
        (8, 8)
    """
    threads, memory = integer(threads, "threads"), size(memory, "memory")
    planned = plan_conversion(source, output, **options)
    return carry_out(planned, force=force, threads=threads, memory=memory, scratch=scratch, progress=progress)
