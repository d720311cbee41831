"""Commands that only read checkpoints: inspect, verify, files, doctor, warm."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Annotated

import typer

import relayout
from relayout.cli.command import (
    EXIT_DIFFERENCE,
    ConvertedArgument,
    JsonOption,
    MemoryOption,
    PathArgument,
    QuietOption,
    RankOption,
    RanksOption,
    ThreadsOption,
    TrustOption,
    VerboseOption,
    examples,
    output,
)
from relayout.errors import PlanError

commands = typer.Typer()


@commands.command(
    rich_help_panel="Inspect",
    epilog=examples("inspect llama-3.1-8b", "inspect llama-3.1-8b --tp 8", "inspect llama-3.1-8b-tp8 --rank 3"),
)
def inspect(
    path: PathArgument,
    rank: RankOption = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp", "-tp", metavar="N", help="For a plain checkpoint: only this degree. Default: 2, 4, 8 and 16."
        ),
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a rank reads, now and after a conversion.

    Also shows tensors and ranks. Reads headers only.
    """
    with output(quiet, verbose, as_json) as out:
        out.begin(f"reading the headers of {path}")
        from relayout.cli import render

        out.show(relayout.inspect(path, rank=rank, tp=tp), render.inspection)


@commands.command(
    rich_help_panel="Convert",
    epilog=examples("verify llama-3.1-8b-tp8", "verify llama-3.1-8b-tp8 --source llama-3.1-8b", "verify llama-3.1-8b"),
)
def verify(
    path: PathArgument,
    source: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="Also compare every slice with this source, by 128-bit digests."),
    ] = None,
    ranks: RanksOption = None,
    trust: TrustOption = None,
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check every byte of a checkpoint, converted or plain.

    For a converted folder, checks the structure, the manifest and the digest of every slice. With --source, also
    compares each slice with the source. Only --source and `relayout restore` prove that the slices of all ranks make
    the tensors of the source.

    For a plain checkpoint, checks headers and index, and every byte with a local digest: from the cache of the hub,
    `hf download --local-dir`, SHA256SUMS or, with --trust, model.sig. Needs no network.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render
        from relayout.commands.verify_source import is_unconverted
        from relayout.storage.stores import find_input

        if source is None and ranks is None and is_unconverted(find_input(path)):
            checked = relayout.verify_source(
                path, trust=trust, threads=threads, memory=memory, progress=out.work("verifying")
            )
            (out if checked.ok else replace(out, quiet=False)).show(checked, render.source_verification)
            if not checked.ok:
                raise typer.Exit(EXIT_DIFFERENCE)
            return
        report = relayout.verify(
            path,
            source=source,
            ranks=ranks,
            trust=trust,
            threads=threads,
            memory=memory,
            progress=out.work("verifying"),
        )
        printing = out if report.ok else replace(out, quiet=False)  # Differences are errors.
        printing.show(report, partial(render.verification, has_source=source is not None))
        if not report.ok:
            raise typer.Exit(EXIT_DIFFERENCE)


class FilesFormat(Enum):
    """Output format of `files`."""

    NAMES = "names"
    CSI = "csi"


def gitignore_pattern(name: str) -> str:
    """Return the .gitignore pattern that matches this file name and nothing else (gitignore(5))."""
    escaped = re.sub(r"([\\*?\[\] ])", r"\\\1", name)
    return f"\\{escaped}" if escaped.startswith(("!", "#")) else escaped


@commands.command(
    rich_help_panel="Distribute",
    epilog=examples(
        "files llama-3.1-8b-tp8 --ranks 0-3",
        "files llama-3.1-8b-tp8 --ranks 0-3 > names.txt",
        "files oci://registry.example.com/llama:tp8 --format csi",
    ),
)
def files(
    path: ConvertedArgument,
    ranks: RanksOption = None,
    null: Annotated[bool, typer.Option("--null", "-0", help="End each name with NUL instead of a newline.")] = False,
    form: Annotated[
        FilesFormat,
        typer.Option(
            "--format",
            help="names: one a line. csi: the value of exclude-file-patterns of ModelPack's CSI driver, which then"
            " pulls these files.",
        ),
    ] = FilesFormat.NAMES,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the names of the files that ranks need.

    For tools that copy files. The last name is relayout.json. A name that begins with - is printed with ./ before it,
    so that tools do not read it as an option.
    """
    with output(quiet, verbose, as_json) as out:
        if null and form is FilesFormat.CSI:
            raise PlanError(
                "--null cannot be combined with --format csi, which prints patterns: omit --null", code="option"
            )
        needed = relayout.files(path, ranks=ranks)
        names = (f"./{file.name}" if file.name.startswith("-") else file.name for file in needed.files)
        text = "".join(f"{name}{chr(0) if null else chr(10)}" for name in names)
        if form is FilesFormat.CSI:
            text = json.dumps([gitignore_pattern(name) for name in needed.unneeded]) + "\n"
        out.print(text, needed.as_json())


@commands.command(
    rich_help_panel="Inspect",
    epilog=examples("doctor llama-3.1-8b-tp8", "doctor llama-3.1-8b-tp8 --rank 0 --device cuda:0"),
)
def doctor(
    path: PathArgument,
    rank: RankOption = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Destination of the tensors. Default: cuda if available.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", "-tp", metavar="N", help="Tensor-parallel ranks. Default: as converted, or 1.")
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which backend a load would use, and why.

    Shows file system, direct I/O, page cache and GPU. Reads headers only.
    """
    with output(quiet, verbose, as_json) as out:
        out.begin(f"reading the headers of {path}")
        from relayout.cli import render
        from relayout.loader import diagnose as diagnosis

        out.show(diagnosis.diagnose(path, rank=rank, device=device, tp=tp), render.diagnosis)


@commands.command(
    rich_help_panel="Distribute",
    epilog=examples("warm llama-3.1-8b-tp8", "warm llama-3.1-8b-tp8 --rank 0 --memory 16GB"),
)
def warm(
    path: PathArgument,
    rank: RankOption = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Maximum bytes to cache. Default: half of the free memory."),
    ] = None,
    threads: Annotated[int, typer.Option(metavar="N", help="Requests in flight.")] = 4,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read files into the page cache before a load."""
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render

        done = relayout.warm(path, rank=rank, memory=memory, threads=threads, progress=out.work("warming"))
        out.show(done, render.warmed)
