"""Commands that write or delete: convert, restore, copy, delta, apply, sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import relayout
from relayout.cli.command import (
    ConvertedArgument,
    DegreeOption,
    ExpertParallelOption,
    ForceOption,
    IfMissingOption,
    JsonOption,
    MemoryOption,
    PlanOption,
    Printing,
    QuietOption,
    RanksOption,
    ScratchOption,
    SourceArgument,
    ThreadsOption,
    TrustOption,
    TrustRemoteCodeOption,
    VerboseOption,
    examples,
    output,
)
from relayout.errors import PlanError, and_others

if TYPE_CHECKING:
    from relayout.conversion.layout import Conversion

commands = typer.Typer()

_AlignOption = Annotated[
    str, typer.Option(metavar="BYTES", help="Tensors start at multiples of this power of two, 512 to 16MiB.")
]
_OutputOption = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="OUT", help="Folder to write. Default: SRC-tpN next to SRC."),
]
_UnmatchedOption = Annotated[
    Literal["error", "replicate"] | None,
    typer.Option(
        metavar="error|replicate",
        help="What to do with tensors that no rule of the plan matches. Default: error. With --plan transformers,"
        " which lists only sliced tensors, the default is replicate, for at most a quarter of the bytes.",
    ),
]
_PartSizeOption = Annotated[
    str, typer.Option(metavar="SIZE", help="Split each rank into files of at most about this size.")
]
_LayoutOption = Annotated[
    Literal["ranks", "whole"],
    typer.Option(
        metavar="ranks|whole",
        help="ranks: separate files for each rank's slices. whole: whole tensors, readable by stock loaders,"
        " plus a copy of each slice that is not contiguous in them; a third larger for a Llama.",
    ),
]
_UnitOption = Annotated[
    str | None,
    typer.Option(
        metavar="K/N",
        help="Convert only every N-th unit, starting with unit K (from 0), as one of N processes on machines that"
        " share SRC and OUT. --max-part-size sets the number of units, --dry-run shows it.",
    ),
]


@commands.command(
    rich_help_panel="Convert",
    epilog=examples(
        "convert llama-3.1-8b --tp 8",
        "convert llama-3.1-8b --tp 8 --dry-run",
        "convert llama-3.1-8b --tp 4 -o /fast/llama-tp4 --layout whole",
    ),
)
def convert(
    source: SourceArgument,
    tp: DegreeOption,
    align: _AlignOption = "4096",
    output_folder: _OutputOption = None,
    plan: PlanOption = None,
    expert_parallel: ExpertParallelOption = False,
    unmatched: _UnmatchedOption = None,
    trust_remote_code: TrustRemoteCodeOption = False,
    max_part_size: _PartSizeOption = "4GB",
    layout: _LayoutOption = "ranks",
    ranks: RanksOption = None,
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    scratch: ScratchOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    force: ForceOption = False,
    if_missing: IfMissingOption = False,
    unit: _UnitOption = None,
    commit: Annotated[
        bool, typer.Option("--commit", help="Publish OUT after processes with --unit have converted all units.")
    ] = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rewrite a checkpoint for N tensor-parallel ranks.

    OUT appears complete or not at all; SRC is only read. After an interruption the same command resumes. With --tp 1
    any model can be converted; stock loaders can then read the folder.
    """
    with output(quiet, verbose, as_json) as out:
        way = _Way(dry_run, force, if_missing, threads, memory, scratch, unit, commit)
        out.begin(f"reading the headers of {source}")
        planned = relayout.plan_conversion(
            source,
            output_folder,
            tp=tp,
            align=align,
            plan=plan,
            expert_parallel=expert_parallel,
            unmatched=unmatched,
            trust_remote_code=trust_remote_code,
            max_part_nbytes=max_part_size,
            layout=layout,
            ranks=ranks,
        )
        way.carry_out(planned, out)


@dataclass(frozen=True, slots=True)
class _Way:
    """The mode of `convert`: print a preview, convert here, convert some units of an array, or commit."""

    dry_run: bool
    force: bool
    if_missing: bool
    threads: int
    memory: str
    scratch: str | None
    unit: str | None
    commit: bool

    def __post_init__(self) -> None:
        if self.unit is not None and self.commit:
            raise PlanError("--unit cannot be combined with --commit: run --commit separately", code="option")

    def carry_out(self, planned: Conversion, out: Printing) -> None:
        """Carry out a conversion and print the result, or print a preview."""
        from relayout.cli import render

        if self.dry_run:
            out.show(relayout.preview(planned), render.preview)
            return
        from relayout.conversion import jobs, run

        force, threads, memory, scratch = self.force, self.threads, self.memory, self.scratch
        progress = out.work("converting")
        if self.if_missing and _is_there(
            str(planned.output), run.differences(planned, threads=threads, memory=memory), out, force=force
        ):
            return
        if self.unit is not None:
            share = jobs.convert_share(
                planned, self.unit, force=force, threads=threads, memory=memory, scratch=scratch, progress=progress
            )
            out.show(share, render.units)
        elif self.commit:
            out.show(jobs.commit_units(planned, force=force), render.committed)
        else:
            done = run.carry_out(
                planned, force=force, threads=threads, memory=memory, scratch=scratch, progress=progress
            )
            out.show(done, render.summary)


def _is_there(output_folder: str, differences: list[str] | None, out: Printing, *, force: bool) -> bool:
    """Return True, after reporting it, if `--if-missing` found an identical output.

    Args:
        differences: differences between the existing output and the one to write; None: it is missing or damaged.
        force: True if a different output is to be replaced.
    """
    from relayout.cli import render
    from relayout.commands.copy import already_there

    if differences is None or (differences and force):
        return False
    if differences:
        what = f"is not what this command makes: {and_others(differences)}; it is unchanged; --force replaces it"
        raise PlanError(what, path=output_folder, code="exists")
    out.show(already_there(output_folder), render.already_there)
    return True


@commands.command(rich_help_panel="Convert", epilog=examples("restore llama-3.1-8b-tp8 -o llama-3.1-8b"))
def restore(
    path: ConvertedArgument,
    output_folder: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")],
    trust: TrustOption = None,
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    scratch: ScratchOption = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace DIR if it is a converted folder. An earlier restored folder cannot be recognized: delete it.",
        ),
    ] = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rebuild the source from a converted folder.

    Writes shards, index and side files, byte for byte, and checks every digest.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render

        done = relayout.restore(
            path,
            output_folder,
            force=force,
            trust=trust,
            threads=threads,
            memory=memory,
            scratch=scratch,
            progress=out.work("restoring"),
        )
        out.show(done, render.restored)


@commands.command(
    rich_help_panel="Distribute",
    epilog=examples(
        "copy s3://bucket/llama-3.1-8b-tp8 /nvme/llama --ranks 0-3",
        "copy s3://bucket/llama-v2 /nvme/llama-v2 --reuse /nvme/llama-v1",
        "copy llama-3.1-8b-tp8 gs://bucket/llama",
    ),
)
def copy(
    path: Annotated[str, typer.Argument(metavar="SRC", help="A folder that `relayout convert` wrote, or its URL.")],
    output_folder: Annotated[str, typer.Argument(metavar="DST", help="The folder or prefix to write.")],
    ranks: RanksOption = None,
    reuse: Annotated[
        str | None,
        typer.Option(
            "--reuse",
            metavar="OLD",
            help="An older version, on the drive or in the bucket of DST. Bytes that it already has are not read from"
            " SRC. With --force, OLD can be DST.",
        ),
    ] = None,
    trust: TrustOption = None,
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    scratch: ScratchOption = None,
    force: ForceOption = False,
    if_missing: IfMissingOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the files that ranks need between folders and stores.

    Compares every byte with its digest. DST appears complete or not at all, and its manifest lists its ranks. After an
    interruption the same command resumes.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render
        from relayout.commands.copy import differences_from_copy

        progress = out.work("copying")
        if if_missing and _is_there(
            output_folder, differences_from_copy(path, output_folder, ranks=ranks, trust=trust), out, force=force
        ):
            return
        done = relayout.copy(
            path,
            output_folder,
            ranks=ranks,
            reuse=reuse,
            force=force,
            trust=trust,
            threads=threads,
            memory=memory,
            scratch=scratch,
            progress=progress,
        )
        out.show(done, render.copied)


@commands.command(rich_help_panel="Update", epilog=examples("delta step-1 step-2 -o step-1-to-2"))
def delta(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A folder that `relayout convert` wrote, or its URL.")],
    new: Annotated[
        str, typer.Argument(metavar="NEW", help="Another version of the same model, converted with the same options.")
    ],
    output_folder: Annotated[str, typer.Option("--output", "-o", metavar="DELTA", help="Folder to write, or its URL.")],
    threads: ThreadsOption = 8,
    scratch: ScratchOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the changes between two converted folders.

    Unchanged elements take almost no space, wherever they are.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render

        done = relayout.delta(
            old, new, output_folder, force=force, threads=threads, scratch=scratch, progress=out.work("comparing")
        )
        out.show(done, render.delta_done)


@commands.command(
    rich_help_panel="Update",
    epilog=examples("apply step-1 step-1-to-2 -o step-2", "apply step-1 step-1-to-2 step-2-to-3 -o step-3"),
)
def apply(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The folder that the first delta was made from.")],
    changes: Annotated[
        list[str],
        typer.Argument(metavar="DELTA", help="Deltas that `relayout delta` wrote, in order: folders or URLs."),
    ],
    output_folder: Annotated[str, typer.Option("--output", "-o", metavar="NEW", help="Folder to write, or its URL.")],
    threads: ThreadsOption = 8,
    scratch: ScratchOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the result of applying deltas to a base.

    The output equals the folder that the last delta was made from, byte for byte; every digest is compared. After an
    interruption the same command resumes.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render

        done = relayout.apply_deltas(
            base, changes, output_folder, force=force, threads=threads, scratch=scratch, progress=out.work("copying")
        )
        out.show(done, render.copied)


@commands.command(
    rich_help_panel="Convert",
    epilog=examples(
        "sign llama-3.1-8b-tp8 --key release.key",
        "sign s3://bucket/llama-tp8 --key my.key --certificate my.crt",
    ),
)
def sign(
    path: ConvertedArgument,
    key: Annotated[str, typer.Option(metavar="FILE", help="A private key on an elliptic curve, as PEM.")],
    certificate: Annotated[str | None, typer.Option(metavar="FILE", help="The certificate of that key, PEM.")] = None,
    chain: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="An intermediate certificate; repeatable.")
    ] = None,
    threads: ThreadsOption = 8,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Sign a converted folder.

    Reads every byte once, compares it with its digest, and writes model.sig, which `model_signing verify` accepts.
    Under a policy (RELAYOUT_TRUST, --trust), later readers verify each byte while they read it.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render

        done = relayout.sign(
            path, key=key, certificate=certificate, chain=chain or (), threads=threads, progress=out.work("hashing")
        )
        out.show(done, render.signed)
