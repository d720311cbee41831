"""The command line: parse, call one library function, print, exit code."""

from __future__ import annotations

import errno
import inspect as python
import json
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, NoReturn, Protocol, TypeVar

import typer

import relayout
from relayout.cli import signals
from relayout.cli.streams import abandon
from relayout.errors import PlanError, RelayoutError, did_you_mean, escape_controls, shown
from relayout.storage.file_pool import advice_on_limit

if TYPE_CHECKING:
    from relayout.cli.console import Block
    from relayout.progress import Progress

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


# Paths are `str`: each may be the URL of a store.
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint folder, a snapshot, a .safetensors file, the URL of a store, or ORG/MODEL on the hub.",
    ),
]
PathArgument = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A .safetensors file, a checkpoint folder, plain or converted, or its URL."),
]
ConvertedArgument = Annotated[
    str, typer.Argument(metavar="CONVERTED", help="A folder that `relayout convert` wrote, or its URL.")
]
PlanOption = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN",
        help="A plan file (TOML); the name of a built-in plan, such as llama; 'transformers' for the plan of that"
        " package; or 'vllm' to observe the installed vLLM. "
        "Default: the built-in plan for model_type in config.json.",
    ),
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow vLLM to run the Python files of SRC for --plan vllm.")
]
TrustFileOption = Annotated[
    str | None,
    typer.Option(
        "--trust", metavar="FILE", help="Whose signatures count (TOML): all else is refused. Default: RELAYOUT_TRUST."
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace an older output that relayout wrote; discard an interrupted attempt at another."
    ),
]
IfMissingOption = Annotated[
    bool,
    typer.Option(
        "--if-missing", help="If the output is there, complete, and the same, exit with 0. Another is still an error."
    ),
]
ThreadsOption = Annotated[int, typer.Option(metavar="N", help="Threads that read, copy, hash and write.")]
MemoryOption = Annotated[str, typer.Option(metavar="SIZE", help="Memory limit of these threads.")]
RankOption = Annotated[
    int | None, typer.Option(metavar="R", help="Only this rank of a converted checkpoint. Default: all.")
]
RanksOption = Annotated[
    str | None, typer.Option(metavar="LIST", help="Only these ranks, such as 0-3 or 0,8. Default: all.")
]


class _Result(Protocol):
    def as_json(self) -> dict[str, object]: ...


R = TypeVar("R", bound=_Result)


@dataclass(frozen=True, slots=True)
class Output:
    """How a command prints, by the options that all commands have."""

    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print all rows, and progress even if stderr is not a terminal.")
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; progress and errors are JSON lines on stderr.")
    ] = False

    def work(self, what: str) -> Progress:
        """Begin work: from now on, a signal raises an exception, for cleanup, and a closed stdout does not end the
        process. Returns how its progress is shown. Called among the arguments of the work: a signal while that is
        imported then still ends the process at once."""
        from relayout.cli.console import progress

        signals.raise_when_asked()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return progress(what, as_json=self.as_json, quiet=self.quiet, verbose=self.verbose)

    def show(self, result: R, text: Callable[[R], Iterable[Block]]) -> None:
        """Print a result. A closed stdout does not change the exit code, which reports the work."""
        from relayout.cli.console import show

        try:
            if self.as_json:
                _print(json.dumps(result.as_json()) + "\n")
            elif not self.quiet:
                show(text(result), verbose=self.verbose)
        except BrokenPipeError:
            abandon(sys.stdout)
        except OSError as error:
            error.filename = "standard output"
            raise

    def print(self, text: str, result: object) -> None:
        """Print a text for other programs, or with --json what it is made of."""
        if self.as_json:
            _print(json.dumps(result) + "\n")
        elif not self.quiet:
            _print(text)


def _command(*examples: str) -> Callable[[Callable[Concatenate[Output, ...], None]], Callable[..., None]]:
    """Register a command, with examples in its help. It gets an `Output`, and its errors are printed."""
    text = "\b\nExamples:\n" + "\n".join(f"  relayout {line}" for line in examples)
    common = list(python.signature(Output, eval_str=True).parameters.values())

    def register(function: Callable[Concatenate[Output, ...], None]) -> Callable[..., None]:
        @wraps(function)
        def run(**options: Any) -> None:
            out = Output(**{option.name: options.pop(option.name) for option in common})
            with _errors(as_json=out.as_json), _warnings(out):
                function(out, **options)

        _, *own = python.signature(function, eval_str=True).parameters.values()
        run.__signature__ = python.Signature([*own, *common])  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in (*own, *common)}
        return app.command(epilog=text)(run)

    return register


def main() -> None:
    """Parse the command line, run the command, and raise SystemExit with the exit code."""
    with signals.restored():
        signals.leave_when_asked()
        # A command that only prints ends by SIGPIPE when its reader is gone, as other commands do.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            with _errors(as_json="--json" in sys.argv[1:]):
                try:
                    code = app(prog_name="relayout", standalone_mode=False)
                except _UsageError as error:
                    if not sys.argv[1:]:  # The error is the help.
                        error.show()
                        raise typer.Exit(EXIT_BAD_INPUT) from None
                    raise PlanError(_usage(error), code="option") from None
        except typer.Exit as end:
            code = end.exit_code
        sys.exit(code)


_UsageError: Any = typer.BadParameter.__mro__[1]
"""Of which all errors of usage are: typer has its own copy of click or the package, and exports only a few classes."""


def _usage(error: Any) -> str:
    """The text of an error of usage, in one line, as of all other errors."""
    text = str(error.format_message()).rstrip(".")
    parameter, name = getattr(error, "param", None), getattr(error, "option_name", None)
    context: Any = getattr(error, "ctx", None)
    if parameter is not None and error.message:
        # What typer raises names no value; its cause does, if that is pydantic's.
        details: Any = getattr(error.__cause__, "errors", lambda: [{}])()[0]
        wrong = str(error.message).removeprefix("Value error, ").rstrip(".")
        if str(details.get("type")).startswith("int_"):
            wrong = f"{shown(details['input'])} is not an integer"
        return f"{parameter.opts[0] if parameter.opts[0].startswith('-') else parameter.metavar}: {wrong}"
    advice = "" if context is None else f"; see {context.command_path} --help"
    if name is not None and text.startswith("No such option"):
        known = [option for each in context.command.params for option in each.opts if option.startswith("--")]
        # Engines have -tp: a single letter is all that is left of it.
        words = [
            f"-{word.partition('=')[0]}" for word in sys.argv[1:] if word.startswith(name) and not name.startswith("--")
        ]
        # Without the dashes, which all names have in common.
        similar = did_you_mean(name[2:], (option[2:] for option in known)).replace("'", "'--", 1)
        meant = next((f"; did you mean {word!r}?" for word in words if word in known), similar)
        text, advice = f"no such option: {name}", meant or advice
    if "unexpected extra argument" in text and any("-o" in each.opts for each in context.command.params):
        advice = f"; name the output with -o{advice}"
    if ". Did you mean" in text:  # Of a command.
        text, advice = text.replace(". Did", "; did"), ""
    return f"{text[:1].lower()}{text[1:]}{advice}"


def _show_version(wanted: bool) -> None:
    if wanted:
        from relayout.format.index import FORMAT_VERSION

        print(f"relayout {relayout.__version__}, format {FORMAT_VERSION}", flush=True)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@_command(
    "convert llama-3.1-8b --tp 8",
    "convert llama-3.1-8b --tp 8 --dry-run",
    "convert llama-3.1-8b --tp 4 -o /fast/llama-tp4 --layout whole",
)
def convert(
    out: Output,
    source: SourceArgument,
    tp: Annotated[
        int | None,
        typer.Option("--tp", metavar="N", help="Number of tensor-parallel ranks, to be given; 1 cuts no tensor."),
    ] = None,
    align: Annotated[
        str, typer.Option(metavar="BYTES", help="Tensors start at multiples of this power of two, 512 to 16MiB.")
    ] = "4096",
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="OUT", help="Folder to write. Default: SRC-tpN beside the folder SRC."),
    ] = None,
    plan: PlanOption = None,
    expert_parallel: Annotated[
        bool,
        typer.Option(
            "--expert-parallel", help="Assign whole experts to ranks, in contiguous blocks, instead of cutting them."
        ),
    ] = False,
    unmatched: Annotated[
        Literal["error", "replicate"] | None,
        typer.Option(
            metavar="error|replicate",
            help="What to do with tensors that no rule of the plan matches. Default: error; with --plan transformers,"
            " which lists only tensors that are cut: replicate.",
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    max_part_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Split each rank into files of at most about this size.")
    ] = "48GB",
    layout: Annotated[
        Literal["ranks", "whole"],
        typer.Option(
            metavar="ranks|whole",
            help="ranks: separate files for each rank's slices. whole: whole tensors, which stock loaders read, and"
            " each rank's slices that are not contiguous in them; a third larger for a Llama.",
        ),
    ] = "ranks",
    ranks: RanksOption = None,
    digest: Annotated[
        Literal["xxh3_128", "sha256"],
        typer.Option(
            metavar="xxh3_128|sha256",
            help="How stored bytes are hashed: xxh3_128 detects damage, sha256 is what a signature needs.",
        ),
    ] = "xxh3_128",
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    force: ForceOption = False,
    if_missing: IfMissingOption = False,
    unit: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Convert only every N-th unit, starting with unit K (from 0), as one of N processes on machines that"
            " share SRC and OUT. --max-part-size sets the number of units, --dry-run shows it.",
        ),
    ] = None,
    commit: Annotated[
        bool, typer.Option("--commit", help="Publish OUT after processes with --unit have converted all units.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Convert on the nodes of this Ray cluster: auto (RAY_ADDRESS, or that of this machine), HOST:PORT, or"
            " local to start one.",
        ),
    ] = None,
) -> None:
    """Rewrite a checkpoint for N tensor-parallel ranks.

    OUT appears complete or not at all; SRC is only read. After an interruption the same command resumes. With --tp 1
    any model can be converted, into a folder for stock loaders.
    """
    from relayout.cli import render
    from relayout.commands.convert import PlanOptions, plan_conversion

    if tp is None:
        raise PlanError(
            "--tp N is missing, the number of ranks; --tp 1 converts for one, and cuts no tensor", code="option"
        )
    if ray is not None and if_missing:
        raise PlanError("--ray cannot be combined with --if-missing", code="option")
    if ray is not None and (unit is not None or commit):
        raise PlanError("--ray cannot be combined with --unit or --commit: it does both", code="option")
    if unit is not None and commit:
        raise PlanError("--unit cannot be combined with --commit: run --commit separately", code="option")
    options: PlanOptions = {
        "tp": tp,
        "align": align,
        "plan": plan,
        "expert_parallel": expert_parallel,
        "unmatched": unmatched,
        "trust_remote_code": trust_remote_code,
        "max_part_nbytes": max_part_size,
        "layout": layout,
        "ranks": ranks,
        "digest": digest,
    }
    if ray is not None and not dry_run:
        from relayout.clusters import on_ray

        done = on_ray.convert(
            source,
            output,
            address=ray,
            force=force,
            threads=threads,
            memory=memory,
            progress=out.work("converting"),
            **options,
        )
        out.show(done, render.summary)
        return
    planned = plan_conversion(source, output, **options)
    progress = None if dry_run else out.work("converting")
    if dry_run:
        out.show(planned.preview(), render.preview)
    elif if_missing and planned.is_done(threads=threads, memory=memory):
        from relayout.commands.copy import AlreadyThere

        out.show(AlreadyThere(str(planned.output)), render.already_there)
    elif unit is not None:
        from relayout.conversion import jobs

        share = jobs.convert_share(planned, unit, force=force, threads=threads, memory=memory, progress=progress)
        out.show(share, render.units)
    elif commit:
        from relayout.conversion import jobs

        out.show(jobs.commit_units(planned, force=force), render.committed)
    else:
        out.show(planned.run(force=force, threads=threads, memory=memory, progress=progress), render.summary)


@_command("plans", "plans llama > my-plan.toml", "plans --check my-model")
def plans(
    out: Output,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this plan.")] = None,
    observe: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="Observe how the installed vLLM shards SRC, and write a plan file."),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The plan that --observe writes.")
    ] = "plan.toml",
    trust_remote_code: TrustOption = False,
    check: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="List the tensors of a checkpoint that no rule matches; exit with 1 if any."),
    ] = None,
    plan: PlanOption = None,
) -> None:
    """List the built-in plans, print one, or make or check one for a checkpoint."""
    from relayout.cli import render
    from relayout.plans import family

    if observe is not None:
        from relayout.observe.observation import observe_plan

        written = observe_plan(observe, output, trust_remote_code=trust_remote_code)
        out.show(written, render.observed)
    elif check is not None:
        from relayout.commands.plan_check import check_plan

        checked = check_plan(check, plan=plan)
        out.show(checked, render.plan_check)
        if not checked.ok:
            raise typer.Exit(EXIT_DIFFERENCE)
    elif name is not None:
        text = family.builtin_text(name)
        out.print(text, {"name": name, "text": text})
    elif out.as_json:
        _print(json.dumps({plan.name: plan.model_types for plan in family.builtin_families()}) + "\n")
    elif not out.quiet:
        from relayout.cli.console import show

        show(render.families(family.builtin_families()), verbose=True)


@_command("inspect llama-3.1-8b", "inspect llama-3.1-8b --tp 8", "inspect llama-3.1-8b-tp8 --rank 3")
def inspect(
    out: Output,
    path: PathArgument,
    rank: RankOption = None,
    tp: Annotated[
        int | None,
        typer.Option("--tp", metavar="N", help="For a plain checkpoint: only this degree. Default: 2, 4, 8 and 16."),
    ] = None,
) -> None:
    """Show what a rank reads, now and after a conversion.

    Also shows tensors and ranks. Reads headers only.
    """
    from relayout.cli import render

    out.show(relayout.inspect(path, rank=rank, tp=tp), render.inspection)


@_command("verify llama-3.1-8b-tp8", "verify llama-3.1-8b-tp8 --source llama-3.1-8b")
def verify(
    out: Output,
    path: ConvertedArgument,
    source: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="Also compare every slice with this source, by 128-bit digests."),
    ] = None,
    ranks: RanksOption = None,
    trust: TrustFileOption = None,
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
) -> None:
    """Check every byte of a converted folder.

    Checks structure, manifest, and the digest of every slice; with --source, each slice against the source.
    """
    from relayout.cli import render

    report = relayout.verify(
        path, source=source, ranks=ranks, trust=trust, threads=threads, memory=memory, progress=out.work("verifying")
    )
    out.show(report, partial(render.report, has_source=source is not None))
    if not report.ok:
        raise typer.Exit(EXIT_DIFFERENCE)


@_command(
    "sign llama-3.1-8b-tp8 --key release.key",
    "sign s3://bucket/llama-tp8 --key my.key --certificate my.crt",
)
def sign(
    out: Output,
    path: ConvertedArgument,
    key: Annotated[str, typer.Option(metavar="FILE", help="A private key: an elliptic curve, PEM.")],
    certificate: Annotated[str | None, typer.Option(metavar="FILE", help="Of that key, PEM.")] = None,
    chain: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A certificate between that one and a root; repeatable.")
    ] = None,
    threads: ThreadsOption = 8,
) -> None:
    """Sign a folder that was converted with --digest sha256.

    Reads every byte once, compares it, and writes model.sig, which `model_signing verify` accepts. A policy
    (RELAYOUT_TRUST, --trust) then proves of the folder what is read, as it is read.
    """
    from relayout.cli import render

    done = relayout.sign(
        path, key=key, certificate=certificate, chain=chain or (), threads=threads, progress=out.work("hashing")
    )
    out.show(done, render.signed)


@_command("restore llama-3.1-8b-tp8 -o llama-3.1-8b")
def restore(
    out: Output,
    path: ConvertedArgument,
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")],
    trust: TrustFileOption = None,
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace DIR if it is a converted folder. A restored one bears no mark of relayout: delete it first.",
        ),
    ] = False,
) -> None:
    """Rebuild the source from a converted folder.

    Writes shards, index and side files, byte for byte, and checks every digest.
    """
    from relayout.cli import render

    done = relayout.restore(
        path, output, force=force, trust=trust, threads=threads, memory=memory, progress=out.work("restoring")
    )
    out.show(done, render.restored)


@_command("copy s3://bucket/llama-3.1-8b-tp8 /nvme/llama --ranks 0-3", "copy llama-3.1-8b-tp8 gs://bucket/llama")
def copy(
    out: Output,
    path: Annotated[str, typer.Argument(metavar="SRC", help="A folder that `relayout convert` wrote, or its URL.")],
    output: Annotated[str, typer.Argument(metavar="DST", help="The folder or prefix to write.")],
    ranks: RanksOption = None,
    trust: TrustFileOption = None,
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    force: ForceOption = False,
    if_missing: IfMissingOption = False,
) -> None:
    """Copy the files that ranks need between folders and stores.

    Compares every byte with its digest. DST appears complete or not at all, and says which ranks it has. After an
    interruption the same command resumes.
    """
    from relayout.cli import render
    from relayout.commands.copy import AlreadyThere, is_copied

    progress = out.work("copying")
    if if_missing and is_copied(path, output, ranks=ranks, trust=trust):
        out.show(AlreadyThere(output), render.already_there)
        return
    done = relayout.copy(
        path,
        output,
        ranks=ranks,
        force=force,
        trust=trust,
        threads=threads,
        memory=memory,
        progress=progress,
    )
    out.show(done, render.copied)


@_command(
    "files llama-3.1-8b-tp8 --ranks 0-3",
    "files llama-3.1-8b-tp8 --ranks 0-3 > names.txt",
)
def files(
    out: Output,
    path: ConvertedArgument,
    ranks: RanksOption = None,
    null: Annotated[bool, typer.Option("--null", "-0", help="End each name with NUL instead of a line end.")] = False,
) -> None:
    """Print the names of the files that ranks need.

    For tools that copy files. relayout.json is the last. A name that begins with - has ./ in front, so that no tool
    takes it for an option.
    """
    needed = relayout.files(path, ranks=ranks)
    names = (f"./{file.name}" if file.name.startswith("-") else file.name for file in needed.files)
    out.print("".join(f"{name}{chr(0) if null else chr(10)}" for name in names), needed.as_json())


@_command("delta step-1 step-2 -o step-1-to-2")
def delta(
    out: Output,
    old: Annotated[str, typer.Argument(metavar="OLD", help="A folder that `relayout convert` wrote, or its URL.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The same model, converted alike, with other weights.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="DELTA", help="Folder to write, or its URL.")],
    threads: ThreadsOption = 8,
    force: ForceOption = False,
) -> None:
    """Write what changed between two converted folders.

    Single elements, anywhere, cost about as much as the places where they are.
    """
    from relayout.cli import render

    done = relayout.delta(old, new, output, force=force, threads=threads, progress=out.work("comparing"))
    out.show(done, render.delta_done)


@_command("apply step-1 step-1-to-2 -o step-2", "apply step-1 step-1-to-2 step-2-to-3 -o step-3")
def apply(
    out: Output,
    base: Annotated[str, typer.Argument(metavar="BASE", help="The folder that the first delta was made from.")],
    changes: Annotated[
        list[str], typer.Argument(metavar="DELTA", help="What `relayout delta` wrote, in order: folders or URLs.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="NEW", help="Folder to write, or its URL.")],
    threads: ThreadsOption = 8,
    force: ForceOption = False,
) -> None:
    """Write the folder that deltas make of their base.

    It is the same as the one that they were made from, byte for byte; every digest is compared. After an interruption
    the same command resumes.
    """
    from relayout.cli import render

    done = relayout.apply_deltas(base, changes, output, force=force, threads=threads, progress=out.work("copying"))
    out.show(done, render.copied)


@_command("doctor llama-3.1-8b-tp8", "doctor llama-3.1-8b-tp8 --rank 0 --device cuda:0")
def doctor(
    out: Output,
    path: PathArgument,
    rank: RankOption = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Destination of the tensors. Default: cuda if available.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks. Default: as converted, or 1.")
    ] = None,
) -> None:
    """Show which backend a load would use, and why.

    Shows file system, direct I/O, page cache and GPU. Reads headers only.
    """
    from relayout.cli import render
    from relayout.loader.diagnose import doctor as diagnosis

    result = diagnosis.diagnose(path, rank=rank, device=device, tp=tp)
    out.show(result, render.diagnosis)


@_command("warm llama-3.1-8b-tp8", "warm llama-3.1-8b-tp8 --rank 0 --memory 16GB")
def warm(
    out: Output,
    path: PathArgument,
    rank: RankOption = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Maximum bytes to cache. Default: half of the free memory."),
    ] = None,
    threads: Annotated[int, typer.Option(metavar="N", help="Requests in flight.")] = 4,
) -> None:
    """Read files into the page cache before a load."""
    from relayout.cli import render

    done = relayout.warm(path, rank=rank, memory=memory, threads=threads, progress=out.work("warming"))
    out.show(done, render.warmed)


@_command("cache", "cache /nvme/relayout --add llama-3.1-8b --tp 8", "cache /nvme/relayout --remove 3f2a")
def cache(
    out: Output,
    folder: Annotated[
        str | None, typer.Argument(metavar="FOLDER", help="The cache's folder. Default: RELAYOUT_CACHE.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Remove the entry whose name begins with this. Repeatable.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all entries.")] = False,
    add: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Convert a folder or URL into the cache, for --tp ranks.")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", help="Of --add: tensor-parallel ranks.")] = None,
    ranks: RanksOption = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of --add: the most bytes to keep. Default: RELAYOUT_CACHE_LIMIT."),
    ] = None,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Of --add: each rank owns whole experts.")
    ] = False,
    observe: Annotated[
        bool, typer.Option("--observe", help="Of --add: observe vLLM if no built-in plan is for the model.")
    ] = False,
    background: Annotated[
        bool,
        typer.Option(
            "--background", help="Of --add: at low priority, until stdin is closed or the parent process ends."
        ),
    ] = False,
) -> None:
    """List the entries of a cache, add one, or remove them.

    Entries are conversions of plain checkpoints, and files of remote ones. Entries in use are not removed.
    """
    from relayout.cli import render
    from relayout.commands import cache as caching

    if add is not None:
        if tp is None:
            raise PlanError("--add needs --tp N", code="option")
        progress = replace(out, quiet=out.quiet or background).work("converting")
        if background:
            signals.end_with_stdin()
        listing = caching.add(
            add,
            tp,
            folder,
            ranks=ranks,
            limit=limit,
            expert_parallel=expert_parallel,
            observe=observe,
            progress=progress,
        )
    else:
        listing = caching.cache(folder, remove=remove or (), clear=clear)
    out.show(listing, render.cache)


@_command("bench llama-3.1-8b-tp8", "bench /fast --size 4GB --tp 8")
def bench(
    out: Output,
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
        typer.Option(metavar="SIZE", help="Measure a temporary checkpoint of this size below PATH, such as 4GB."),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Loads per loader; medians count. Default: as many of 3 as 2 minutes allow."),
    ] = None,
    yes: Annotated[
        bool | None,
        typer.Option(
            "--yes/--no",
            "-y/-n",
            help="Drop these files from the page cache; without that, only warm loads are measured. Default: ask.",
        ),
    ] = None,
) -> None:
    """Measure what relayout gains on this machine.

    Loads one rank, and all ranks at once, by relayout and by other loaders, from a cold and from a warm page cache.
    Each load runs in fresh processes; bytes are compared; the drive's limit is measured. PATH is only read. If it is
    stopped, it prints what was measured by then.
    """
    from relayout.benchmark import measure
    from relayout.cli import render

    def partly(result: measure.Bench) -> None:
        out.show(result, render.bench)

    out.work("measuring")
    if size is not None:
        with measure.made_checkpoint(path, size, tp, _tell) as source:
            result = measure.plan_bench(source, tp=tp, runs=runs).run(drop_caches=True, tell=_tell, partly=partly)
            result = replace(result, source=None, converted=None)
    else:
        plan = measure.plan_bench(path, tp=tp, against=against, runs=runs)
        may_drop = may_drop_caches(len(plan.folders.every_file), plan.droppable_nbytes) if yes is None else yes
        result = plan.run(drop_caches=may_drop, tell=_tell, partly=partly)
    out.show(result, render.bench)
    if result.wrong:
        raise typer.Exit(EXIT_DIFFERENCE)


def may_drop_caches(num_files: int, nbytes: int) -> bool:
    """Ask whether files may be dropped from the page cache; no if nobody can answer."""
    if not sys.stdin.isatty():
        return False
    question = (
        f"Before each cold load, {num_files} files ({nbytes / 1e9:.1f} GB) are dropped from the page cache. Other"
        " processes that use them will wait for the drive. If not, only warm loads are measured. Drop them?"
    )
    try:
        return typer.confirm(_filled(question), err=True)
    except typer.Abort:  # The end of input; Ctrl-C is handled elsewhere.
        return False


def _tell(line: str) -> None:
    try:
        _print_error(escape_controls(line))
    except OSError:  # A closed stderr must not stop the work.
        abandon(sys.stderr)


@_command("report llama-3.1-8b-tp8 -o llama.html", "report llama-3.1-8b --tp 8")
def report(
    out: Output,
    path: PathArgument,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The page to write; replaces an older page. Default: NAME-report.html.",
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="For a plain checkpoint: forecast a conversion to N ranks.")
    ] = None,
    plan: PlanOption = None,
) -> None:
    """Write an HTML page that shows every file and tensor.

    It has bars to scale, tables and a search for each rank, and works offline.
    """
    from relayout.cli import render

    out.show(relayout.report(path, output, tp=tp, plan=plan), render.page)


def _print(text: str) -> None:
    print(text, end="", flush=True)


@contextmanager
def _errors(as_json: bool = False) -> Iterator[None]:
    """Print an error as one line, or one JSON object, and exit with the code of its family."""
    fail = partial(_fail, as_json=as_json)
    try:
        yield
    except RelayoutError as error:
        fail(str(error), EXIT_BAD_INPUT, error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{_reason(error)}", EXIT_IO, error)
    except MemoryError as error:
        fail(f"out of memory: {error}", EXIT_IO, error)
    except ModuleNotFoundError as error:  # A package that an extra brings, such as torch.
        fail(str(error), EXIT_BAD_INPUT, error)
    except signals.Stopped as error:
        signals.ignore()
        fail(str(error), error.exit_code, error)


@contextmanager
def _warnings(out: Output) -> Iterator[None]:
    """Print a warning as one line, or one JSON object, without the place in the program that gave it."""

    def show(message: Warning | str, *where: object, **more: object) -> None:
        if out.as_json:
            _tell(json.dumps({"event": "warning", "message": str(message)}))
        elif not out.quiet:
            _tell(f"relayout: warning: {_one_line(str(message))}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


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
    typer.echo(_filled(line) if sys.stderr is not None and sys.stderr.isatty() else line, err=True)


def _filled(text: str) -> str:
    """The text in lines that fit the terminal and end between words."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


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
