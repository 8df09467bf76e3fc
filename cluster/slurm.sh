#!/bin/bash
# A lesson's function on several hosts under Slurm: one task a host starts torchrun, which starts its ranks.
#
#   sbatch --nodes=2 --gpus-per-node=8 cluster/slurm.sh MODULE:FUNCTION [key=value …]
#
# Without --gpus-per-node the ranks run on the CPU, RANKS_PER_NODE of them on each host (2 by default).
# PYTHON names the Python of the course's environment, by default .venv/bin/python where sbatch was called.
#SBATCH --job-name=course
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:30:00
#SBATCH --output=course-%j.out

set -euo pipefail

if [ $# -eq 0 ]; then
    echo "which function? sbatch --nodes=2 --gpus-per-node=8 $0 MODULE:FUNCTION [key=value …]" >&2
    exit 2
fi
if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "this is a job for Slurm: sbatch $0 $*; on one host, use torchrun" >&2
    exit 2
fi

cd "${SLURM_SUBMIT_DIR:-.}"
python=${PYTHON:-.venv/bin/python}
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-2}}
meet=(--standalone --local-addr=127.0.0.1) # the name of a host may be known nowhere
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    # The ranks meet at the first host; the job's number keeps two jobs on one host apart.
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    meet=(--nnodes="$SLURM_JOB_NUM_NODES" --rdzv-backend=c10d
        --rdzv-endpoint="${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 20000))" --rdzv-id="$SLURM_JOB_ID")
fi

# One host's failure ends the job.
exec srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    "$python" -m torch.distributed.run "${meet[@]}" --nproc-per-node="$ranks" cluster/run.py "$@"
