"""The `relayout` command, also as `python -m relayout`."""

from relayout.cli import signals


def main() -> None:
    """Run the command, then ignore further signals. Call it once per process."""
    signals.leave_when_asked()
    try:
        from relayout.cli import app as cli

        cli.main()
    finally:
        signals.ignore()


if __name__ == "__main__":
    main()
