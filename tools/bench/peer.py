"""One peer loads one rank once, in this process: what `relayout.benchmark.child` does, for the peers of this tool."""

from __future__ import annotations

import json
import sys

from bench.peers import BASELINE, PEERS
from bench.peers_remote import REMOTE_PEERS
from bench.run import PackedJob
from relayout.benchmark.child import serve

if __name__ == "__main__":
    job = PackedJob(**json.loads(sys.argv[1]))
    serve(job, (PEERS | REMOTE_PEERS).get(job.loader, BASELINE))
