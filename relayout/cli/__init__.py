"""The `relayout` command."""

from relayout.cli import signals


def main() -> None:
    """Run the command. Call it once per process: afterwards the process ignores signals.

    A signal ends the process immediately during startup, raises an exception during work, and is ignored at exit.
    """
    signals.exit_on_signal()
    try:
        from relayout.cli import app  # This import is slow.

        app.main()
    finally:
        signals.ignore()
