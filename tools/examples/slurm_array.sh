#!/usr/bin/env bash
# Converts a checkpoint on the nodes of a Slurm cluster that share a file system:
#
#     words=(/models/llama -o /models/llama-tp8 --tp 8 --max-part-size 4GB)
#     units=$(sbatch --parsable --array=0-30 tools/examples/slurm_array.sh "${words[@]}")
#     sbatch --dependency="afterok:${units%%;*}" tools/examples/slurm_array.sh "${words[@]}"
#
# Each task of the array converts every 31st unit; the second job publishes the output. A task that was lost may be run
# again, also twice at the same time, and finds done what is done.
#SBATCH --job-name=relayout
#SBATCH --cpus-per-task=8
#SBATCH --mem=2G
#SBATCH --requeue
set -euo pipefail

if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    exec relayout convert "$@" --unit "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
fi
exec relayout convert "$@" --commit
