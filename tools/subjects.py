"""Checks commit messages: an imperative subject of at most 72 characters, and an empty line below it.

    tools/run subjects                    # the commits that origin/main does not have
    tools/run subjects BASE..HEAD
    tools/run subjects --message FILE     # one message, as git passes it to a commit-msg hook

English has no form by which a program could recognize an imperative. What is refused is what a reader of the log never
takes for one: an article, a pronoun, or a verb that ends in -ed, -ing or -s.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LENGTH = 72
NO_VERBS = frozenset(
    re.findall(
        r"\w+",
        "a all an and both each every for from he how i if in it its no of on one our she some that the their there "
        "these they this those to we what when where which who why with you",
    )
)
_OTHER_FORM = re.compile(r".*(?:[^e]ed|ing|[^su]s)")
IMPERATIVES = frozenset({"alias", "bias", "bring", "canvas", "embed", "ping", "shed", "string"})
"""Verbs that end like another form."""
_WRITTEN_BY_GIT = re.compile(r'(?:Merge |Revert "|fixup! |squash! )')


def faults(message: str) -> Iterator[str]:
    """Yield one line for each fault of a commit message."""
    lines = [line for line in message.split("\n") if not line.startswith("#")]
    subject = lines[0]
    if _WRITTEN_BY_GIT.match(subject):
        return
    if len(subject) > MAX_LENGTH:
        yield f"{len(subject)} characters, expected at most {MAX_LENGTH}: put the reason into the body"
    if subject.endswith((".", ":", ",", ";")):
        yield f"ends with {subject[-1]!r}"
    if len(lines) > 1 and lines[1]:
        yield "no empty line below the subject"
    first = re.match(r"[\w-]+", subject)
    if first is None or not subject[0].isupper():
        yield "begins without a capital letter, expected a verb such as Add or Fix"
        return
    word = first[0].lower()
    if word in NO_VERBS or (_OTHER_FORM.fullmatch(word) and word not in IMPERATIVES):
        yield f"begins with {first[0]!r}, expected an imperative such as Add or Fix"


def messages(commits: str) -> dict[str, str]:
    """Return the messages of the commits of a range, by their short digests; merges are left out."""
    command = ["git", "log", "--no-merges", "-z", "--format=%h%n%B", commits]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"subjects: {done.stderr.strip()}")
    parts = (one.strip("\n").partition("\n") for one in done.stdout.split("\0") if one)
    return {digest: message for digest, _, message in parts}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="subjects", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs="?", default="origin/main..HEAD", help="a range; default: %(default)s")
    parser.add_argument("--message", type=Path, metavar="FILE", help="check the message in this file instead")
    arguments = parser.parse_args()
    if arguments.message is not None:
        found = {str(arguments.message): arguments.message.read_text()}
    else:
        found = messages(arguments.commits)
    lines = [
        f"{name} {text.partition(chr(10))[0]!r}: {fault}" for name, text in found.items() for fault in faults(text)
    ]
    print(*lines, f"{len(found)} messages, {len(lines)} faults", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
