#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Several nodes under SLURM: one agent per node, one rank per GPU.
#   sbatch --nodes 4 examples/02_slurm.sh gpt_1b_nodes --data /data/tokens/
#SBATCH --job-name=shardwise
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
# Two minutes before the time limit this script hears of it, and asks the ranks to save and stop.
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail

RUN="${RUN:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}"   # on a file system that all nodes share
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# A job that was requeued goes on from its newest checkpoint, or begins anew if it has none yet.
RESUME=()
if [ -d "$RUN" ]; then RESUME=(--resume); fi

mkdir -p "$(dirname "$RUN")"
# Ranks look for this file after every step; one that finds it makes all save and exit with 0.
export SHARDWISE_STOP="$RUN.stop"
rm -f "$SHARDWISE_STOP"
trap 'touch "$SHARDWISE_STOP"' TERM

srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id "$SLURM_JOB_ID" \
  --max-restarts 3 \
  -m shardwise.cli train "$@" --out "$RUN" "${RESUME[@]}" &
wait $! || wait $!   # the first wait ends when the signal comes
