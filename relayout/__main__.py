"""The `relayout` command, also as `python -m relayout`."""

from relayout import signals


def main() -> None:
    """Run the command; to be called once, as the process ends with it."""
    signals.leave_when_asked()
    try:
        from relayout import cli  # A Ctrl-C may come while this is imported.

        cli.main()
    finally:
        signals.ignore()


if __name__ == "__main__":
    main()
