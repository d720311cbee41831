"""The `relayout` command: parse, call one library function, print, exit code. Imports all of the above."""
