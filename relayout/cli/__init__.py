"""The `relayout` command."""

from relayout.cli import signals


def main() -> None:
    """Run the command; once per process, as it ignores further signals.

    A signal ends it at once while it starts, raises an exception once it works, and is ignored at its end.
    """
    signals.leave_when_asked()
    try:
        from relayout.cli import app  # Takes a while.

        app.main()
    finally:
        signals.ignore()
