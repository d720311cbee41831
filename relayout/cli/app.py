"""The command line: parse, call one library function, print, exit code."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal, NoReturn, Protocol, TypeVar

import typer

from relayout import __version__
from relayout.cli import signals
from relayout.cli.streams import abandon
from relayout.errors import PlanError, RelayoutError, escape_controls
from relayout.storage.file_pool import advice_on_limit

EXIT_DIFFERENCE = 1
EXIT_BAD_INPUT = 2
EXIT_IO = 3

_MAX_MESSAGE_LENGTH = 2000
"""Characters."""

app = typer.Typer(
    name="relayout",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Plain help: wide columns, right on any terminal, and quick.
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rewrite safetensors checkpoints so that each tensor-parallel rank reads only its own bytes, "
    "contiguous and aligned.",
    epilog="""\b
First steps:
  relayout inspect MODEL             what a rank would read today
  relayout convert MODEL --tp 8      writes MODEL-tp8 beside it
  vllm serve MODEL-tp8 -tp 8 --load-format relayout
  relayout.load('MODEL-tp8', rank)   in Python

\b
Exit codes: 0 done, 1 verification found a difference, 2 bad input or usage,
3 I/O failure, 130 interrupted, 143 terminated.""",
)


def _examples(*lines: str) -> str:
    """Commands at the end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  relayout {line}" for line in lines)


JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; progress and errors are JSON lines on stderr.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print all rows; tell the progress where stderr is no terminal, too.")
]

# Paths are `str`: each may be the URL of a store.
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint folder, snapshot, or .safetensors file; a store's URL; or ORG/MODEL of the hub.",
    ),
]
OutputOption = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="OUT", help="Folder to write. Default: SRC-tpN beside the folder SRC."),
]
PlanOption = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN",
        help="A plan file (TOML); the name of a built-in plan, such as llama; 'transformers' for the plan of that"
        " package; or 'vllm' to cut as the classes of the vLLM that is installed do. "
        "Default: the built-in plan for model_type in config.json.",
    ),
]
PathArgument = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A .safetensors file, or a folder, converted or not; or its URL."),
]
ThreadsOption = Annotated[int, typer.Option(metavar="N", help="Threads that read, copy, hash and write.")]
MemoryOption = Annotated[str, typer.Option(metavar="SIZE", help="Memory that these threads may use.")]
ConvertedArgument = Annotated[
    str, typer.Argument(metavar="OUT", help="A folder that `relayout convert` wrote, or its URL.")
]
EngineOption = Annotated[
    Literal["ray"] | None, typer.Option(help="Do the work on the nodes of a Ray cluster. Default: in this process.")
]
AddressOption = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="The Ray cluster, such as auto. Default: RAY_ADDRESS, or this machine alone."),
]
CompareOption = Annotated[
    str | None,
    typer.Option(metavar="SRC", help="Also compare every slice with this source, by 128-bit digests."),
]


def main() -> None:
    """Parse the command line, run the command, and raise SystemExit with the exit code."""
    with signals.restored():
        signals.leave_when_asked()
        # A command that only prints ends by SIGPIPE when its reader is gone, as other commands do.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            with _errors():
                app()
        except typer.Exit as end:
            sys.exit(end.exit_code)


def _show_version(wanted: bool) -> None:
    if wanted:
        from relayout.format.index import FORMAT_VERSION

        print(f"relayout {__version__}, format {FORMAT_VERSION}", flush=True)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog=_examples(
        "convert llama-3.1-8b --tp 8",
        "convert llama-3.1-8b --tp 8 --dry-run",
        "convert llama-3.1-8b --tp 4 -o /fast/llama-tp4 --layout whole",
    )
)
def convert(
    source: SourceArgument,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Number of tensor-parallel ranks.")] = 1,
    align: Annotated[
        str, typer.Option(metavar="BYTES", help="Tensors start at multiples of this power of two, 512 to 16MiB.")
    ] = "4096",
    output: OutputOption = None,
    plan: PlanOption = None,
    expert_parallel: Annotated[
        bool,
        typer.Option(
            "--expert-parallel", help="Give each expert whole to one rank, in contiguous blocks, instead of cutting it."
        ),
    ] = False,
    unmatched: Annotated[
        Literal["error", "replicate"] | None,
        typer.Option(
            metavar="error|replicate",
            help="How to treat tensors that no rule of the plan matches. Default: error; replicate with"
            " --plan transformers, which lists only tensors that are cut.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --plan vllm: run Python files of SRC.")
    ] = False,
    max_part_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Split a rank into files of about this size at most, such as 48GB.")
    ] = "48GB",
    dcp: Annotated[
        bool | None,
        typer.Option(
            "--dcp/--no-dcp",
            help="Write what PyTorch DCP needs to read the ranks as one model. Default: if every slice is one box;"
            " slices of fused tensors are not.",
        ),
    ] = None,
    layout: Annotated[
        Literal["ranks", "whole"],
        typer.Option(
            metavar="ranks|whole",
            help="ranks: each rank's slices in files of its own. whole: whole tensors, which stock loaders read, and"
            " beside them the slices that are not contiguous in them; a third larger for a Llama.",
        ),
    ] = "ranks",
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Store the SHA-256 of each rank file; reads them once more.")
    ] = False,
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace OUT if relayout wrote it; discard an interrupted conversion with other options."
        ),
    ] = False,
    unit: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Convert only every N-th unit from unit K on (from 0), as one of N processes, on any machines that"
            " share SRC and OUT. --max-part-size decides how many units there are, --dry-run tells.",
        ),
    ] = None,
    commit: Annotated[
        bool, typer.Option("--commit", help="Publish OUT when processes with --unit have converted all units.")
    ] = False,
    engine: EngineOption = None,
    address: AddressOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rewrite a checkpoint for N tensor-parallel ranks.

    OUT appears complete or not at all; SRC is only read. After an interruption the same command continues. With --tp 1
    any model can be converted, into a folder for stock loaders.
    """
    with _errors(as_json):
        from relayout.cli import render as terminal
        from relayout.commands.convert import PlanOptions, plan_conversion

        _check_engine(engine, address)
        options: PlanOptions = {
            "tp": tp,
            "align": align,
            "plan": plan,
            "expert_parallel": expert_parallel,
            "unmatched": unmatched,
            "trust_remote_code": trust_remote_code,
            "max_part_nbytes": max_part_size,
            "dcp": dcp,
            "layout": layout,
        }
        if engine is not None and not dry_run:
            if unit is not None or commit:
                raise PlanError("--engine ray with --unit or --commit: it does both", code="option")
            from relayout.clusters import on_ray

            _begin_work()
            progress = terminal.progress("converting", as_json=as_json, quiet=quiet, verbose=verbose)
            summary = on_ray.convert(
                source,
                output,
                address=address,
                force=force,
                sha256=sha256,
                threads=threads,
                memory=memory,
                progress=progress,
                **options,
            )
            _tell(summary, as_json, terminal.print_summary, quiet=quiet)
            return
        planned = plan_conversion(source, output, **options)
        if dry_run:
            _show(planned.preview(), as_json, partial(terminal.print_preview, verbose=verbose), quiet=quiet)
            return
        _begin_work()
        progress = terminal.progress("converting", as_json=as_json, quiet=quiet, verbose=verbose)
        if unit is not None or commit:
            from relayout.conversion import jobs

            if unit is not None and (commit or sha256):
                raise PlanError("--unit with --commit or --sha256: give these to the one that commits", code="option")
            if unit is not None:
                done = jobs.convert_share(planned, unit, force=force, threads=threads, memory=memory, progress=progress)
                _tell(done, as_json, terminal.print_units, quiet=quiet)
            else:
                summary = jobs.commit_units(planned, force=force, sha256=sha256, threads=threads, memory=memory)
                _tell(summary, as_json, terminal.print_committed, quiet=quiet)
            return
        summary = planned.run(force=force, sha256=sha256, threads=threads, memory=memory, progress=progress)
        _tell(summary, as_json, terminal.print_summary, quiet=quiet)


@app.command(epilog=_examples("plans", "plans llama > my-plan.toml", "plans --check my-model"))
def plans(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this plan.")] = None,
    observe: Annotated[
        str | None,
        typer.Option(
            metavar="SRC",
            help="Write a plan for this checkpoint: rules that cut it as the vLLM that is installed does.",
        ),
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="With --observe.")] = "plan.toml",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --observe: run Python files of SRC.")
    ] = False,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="SRC", help="Tell which tensors of a checkpoint have no rule, and print a draft of a plan for them."
        ),
    ] = None,
    plan: PlanOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the built-in plans, print one, or make one for a checkpoint."""
    with _errors(as_json):
        from relayout.cli import render as terminal
        from relayout.plans import family as families

        if observe is not None:
            from relayout.observe.plan_file import observe_plan

            made = observe_plan(observe, output, trust_remote_code=trust_remote_code)
            _show(made, as_json, terminal.print_observed)
            return
        if check is not None:
            from relayout.cli import plan_text
            from relayout.commands import plan_check

            checked = plan_check.check_plan(check, plan=plan)
            _show(checked, as_json, plan_text.print_check)
            if checked.draft_error is not None:
                raise typer.Exit(EXIT_DIFFERENCE)
            return
        if name is not None:
            text = families.builtin_text(name)
            print(
                json.dumps({"name": name, "text": text}) if as_json else text, end="\n" if as_json else "", flush=True
            )
            return
        found = families.builtin_families()
        if as_json:
            print(json.dumps({family.name: family.model_types for family in found}), flush=True)
        else:
            terminal.print_plans(found)


@app.command(epilog=_examples("inspect llama-3.1-8b", "inspect llama-3.1-8b-tp8 --rank 3"))
def inspect(
    path: PathArgument,
    rank: Annotated[
        int | None, typer.Option(metavar="R", help="Show the tensors of this rank of a converted checkpoint.")
    ] = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a rank reads, today and once converted.

    And tensors, ranks and alignment. Reads headers only.
    """
    with _errors(as_json):
        from relayout.cli import render as terminal
        from relayout.commands import inspect as inspection

        found = inspection.inspect(path, rank=rank)
        _show(found, as_json, partial(terminal.print_inspection, verbose=verbose))


@app.command(epilog=_examples("verify llama-3.1-8b-tp8", "verify llama-3.1-8b-tp8 --source llama-3.1-8b"))
def verify(
    path: ConvertedArgument,
    source: CompareOption = None,
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    engine: EngineOption = None,
    address: AddressOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a converted folder, every byte of it.

    Structure, manifest, and the digest of every slice; with --source also each slice against the source.
    """
    with _errors(as_json):
        from relayout.cli import render as terminal
        from relayout.commands import verify as verification

        _check_engine(engine, address)
        _begin_work()
        progress = terminal.progress("verifying", as_json=as_json, quiet=quiet, verbose=verbose)
        if engine is None:
            report = verification.verify(path, source=source, threads=threads, memory=memory, progress=progress)
        else:
            from relayout.clusters import on_ray

            report = on_ray.verify(
                path, source=source, address=address, threads=threads, memory=memory, progress=progress
            )
        _tell(report, as_json, partial(terminal.print_report, verbose=verbose), quiet=quiet)
        if not report.ok:
            raise typer.Exit(EXIT_DIFFERENCE)


@app.command(epilog=_examples("restore llama-3.1-8b-tp8 -o llama-3.1-8b"))
def restore(
    path: ConvertedArgument,
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")],
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    force: Annotated[bool, typer.Option("--force", help="Replace DIR if relayout converted it.")] = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the source again, from a converted folder.

    Shards, index and side files, byte for byte; every digest is checked.
    """
    with _errors(as_json):
        from relayout.cli import render as terminal
        from relayout.commands import restore as restoration

        _begin_work()
        progress = terminal.progress("restoring", as_json=as_json, quiet=quiet, verbose=verbose)
        done = restoration.restore(path, output, force=force, threads=threads, memory=memory, progress=progress)
        _tell(done, as_json, terminal.print_restored, quiet=quiet)


@app.command(epilog=_examples("doctor llama-3.1-8b-tp8", "doctor llama-3.1-8b-tp8 --rank 0 --device cuda:0"))
def doctor(
    path: PathArgument,
    rank: Annotated[int | None, typer.Option(metavar="R", help="Only this rank. Default: all.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Destination of the tensors. Default: cuda if available.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks. Default: as converted, or 1.")
    ] = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which backend a load would use, and why.

    File system, direct I/O, page cache, GPU. Reads nothing but headers.
    """
    with _errors(as_json):
        from relayout.cli import render as terminal
        from relayout.loader.diagnose import doctor as diagnosis

        found = diagnosis.diagnose(path, rank=rank, device=device, tp=tp)
        _show(found, as_json, partial(terminal.print_diagnosis, verbose=verbose))


@app.command(epilog=_examples("warm llama-3.1-8b-tp8", "warm llama-3.1-8b-tp8 --rank 0 --memory 16GB"))
def warm(
    path: PathArgument,
    rank: Annotated[int | None, typer.Option(metavar="R", help="Only this rank's files. Default: all.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of these files to have there. Default: half of the free memory."),
    ] = None,
    threads: Annotated[int, typer.Option(metavar="N", help="Requests in flight.")] = 4,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring files into the page cache before a load.

    An engine that is given RELAYOUT_WARM=PATH in its environment starts this while it imports and prepares.
    """
    with _errors(as_json):
        from relayout.cli import render as terminal
        from relayout.commands import warm as warming

        progress = terminal.progress("warming", as_json=as_json, quiet=quiet, verbose=verbose)
        done = warming.warm(path, rank=rank, memory=memory, threads=threads, progress=progress)
        _show(done, as_json, partial(terminal.print_warmed, verbose=verbose), quiet=quiet)


@app.command(epilog=_examples("bench llama-3.1-8b-tp8", "bench /fast --size 4GB --tp 8"))
def bench(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A checkpoint, plain or converted; with --size, a folder on the drive."),
    ],
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks. Default: as converted.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The same checkpoint, converted or plain. Default: found beside PATH."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Measure a checkpoint made below PATH, such as 4GB, and delete it after."),
    ] = None,
    runs: Annotated[int, typer.Option(metavar="N", help="Loads by each loader; medians count.")] = 3,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Drop these files from the page cache without asking.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what relayout gains on this machine.

    Loads by relayout and by safetensors, cold and warm.

    One rank and all ranks at once, each load in a fresh process, bytes compared, beside the drive's limit. Reads only.
    """
    with _errors(as_json):
        from relayout.benchmark import measure
        from relayout.cli import bench_text

        _begin_work()
        if size is not None:
            with measure.made_checkpoint(path, size, tp, bench_text.tell) as made:
                found = measure.plan_bench(made, tp=tp, runs=runs).run(drop_caches=True, tell=bench_text.tell)
                found = measure.without_paths(found)
        else:
            plan = measure.plan_bench(path, tp=tp, against=against, runs=runs)
            may_drop = bench_text.may_drop_caches(plan, yes=yes)
            found = plan.run(drop_caches=may_drop, tell=bench_text.tell)
        _tell(found, as_json, bench_text.print_bench)
        if found.wrong:
            raise typer.Exit(EXIT_DIFFERENCE)


@app.command(epilog=_examples("report llama-3.1-8b-tp8 -o llama.html", "report llama-3.1-8b --tp 8"))
def report(
    path: PathArgument,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The page to write; it is replaced.")
    ] = "report.html",
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Ranks to forecast a conversion for, of a plain checkpoint.")
    ] = None,
    plan: PlanOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML page that shows every file and tensor.

    Bars to scale, tables, search, for each rank. It works offline.
    """
    with _errors(as_json):
        from relayout.cli import render as terminal
        from relayout.html_report import page

        _show(page.report(path, output, tp=tp, plan=plan), as_json, terminal.print_page)


def _check_engine(engine: str | None, address: str | None) -> None:
    if address is not None and engine is None:
        raise PlanError("--address without --engine ray", code="option")


class _Result(Protocol):
    def as_json(self) -> dict[str, object]: ...


R = TypeVar("R", bound=_Result)


def _show(result: R, as_json: bool, print_text: Callable[[R], None], *, quiet: bool = False) -> None:
    if as_json:
        print(json.dumps(result.as_json()), flush=True)
    elif not quiet:
        print_text(result)


def _begin_work() -> None:
    """From here on a signal raises an exception, for cleanup, and a closed stdout does not end the process."""
    signals.raise_when_asked()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _tell(result: R, as_json: bool, print_text: Callable[[R], None], *, quiet: bool = False) -> None:
    """Print the result. A closed stdout does not change the exit code, which reports the work."""
    try:
        _show(result, as_json, print_text, quiet=quiet)
    except BrokenPipeError:
        abandon(sys.stdout)
    except OSError as error:
        error.filename = "standard output"
        raise


@contextmanager
def _errors(as_json: bool = False) -> Iterator[None]:
    """Print an error as one line, or one JSON object, and exit with the code of its family."""
    fail = partial(_fail, as_json=as_json)
    try:
        yield
    except RelayoutError as error:
        fail(str(error), EXIT_BAD_INPUT, error)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        fail(f"{place}{_reason(error)}", EXIT_IO, error)
    except MemoryError as error:
        fail(f"out of memory: {error}", EXIT_IO, error)
    except ModuleNotFoundError as error:  # A package that an extra brings, such as torch.
        fail(str(error), EXIT_BAD_INPUT, error)
    except signals.Stopped as error:
        signals.ignore()
        fail(str(error), error.exit_code, error)


def _fail(message: str, code: int, error: BaseException, *, as_json: bool) -> NoReturn:
    notes = getattr(error, "__notes__", [])
    try:
        if as_json:
            typer.echo(json.dumps(_error_event(message, code, error) | ({"notes": notes} if notes else {})), err=True)
        else:
            _print_error(f"relayout: error: {_one_line(message)}")
            for note in notes:
                _print_error(f"relayout: note: {_one_line(note)}")
    except OSError:
        abandon(sys.stderr)
    raise typer.Exit(code) from None


def _error_event(message: str, code: int, error: BaseException) -> dict[str, Any]:
    event: dict[str, Any] = {"event": "error", "message": message, "exit_code": code}
    if isinstance(error, RelayoutError):
        path = None if error.path is None else str(error.path)
        event |= {"code": error.code, "path": path, "tensor": error.tensor, "offset": error.offset}
    return event


def _print_error(line: str) -> None:
    """One line; in a terminal it ends between words."""
    if sys.stderr is not None and sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    typer.echo(line, err=True)


def _reason(error: OSError) -> str:
    reason, advice = str(error.strerror or error), advice_on_limit()
    return reason if error.errno != errno.EMFILE or reason.endswith(advice) else f"{reason}; {advice}"


def _one_line(message: str) -> str:
    """The message shortened and escaped for a terminal, because names from files are untrusted."""
    middle = len(message) - _MAX_MESSAGE_LENGTH
    if middle > 0:
        half = _MAX_MESSAGE_LENGTH // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return escape_controls(message)
