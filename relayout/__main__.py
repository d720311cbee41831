"""The `relayout` command, as `python -m relayout`."""

from relayout.cli import main

if __name__ == "__main__":
    main()
