"""`python -m relayout`."""

from relayout.cli import main

main()
