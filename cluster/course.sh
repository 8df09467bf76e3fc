#!/bin/bash
# Any `course` command as a job of Slurm on one host, JupyterLab among them:
#
#   sbatch --gpus=1 cluster/course.sh lab roofline
#   sbatch --gpus=1 cluster/course.sh run --all --junit lessons.xml
#
# `lab` writes into the job's output how you reach it: an ssh tunnel through the login host to the job's host.
# Where hosts refuse ssh, OPEN=1 lets JupyterLab listen on the host's network, guarded by its token.
# PYTHON names the Python of the course's environment, by default .venv/bin/python where sbatch was called.
#SBATCH --job-name=course
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=course-%j.out

set -euo pipefail

if [ $# -eq 0 ]; then
    echo "which command? sbatch --gpus=1 $0 lab, or: sbatch --gpus=1 $0 run --all" >&2
    exit 2
fi
if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "this is a job for Slurm: sbatch --gpus=1 $0 $*; on this host: course $*" >&2
    exit 2
fi

cd "${SLURM_SUBMIT_DIR:-.}"
python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    echo "$python is not on $(hostname): run make venv where all hosts see it, or name a Python in PYTHON" >&2
    exit 2
fi

if [ "$1" = lab ]; then
    host=$(hostname) port=$((20000 + SLURM_JOB_ID % 20000)) # several jobs may share a host
    login=${SLURM_JOB_USER:-$USER}@${SLURM_SUBMIT_HOST:-LOGIN}
    [ ! -f /proc/self/fd/1 ] || chmod go-rwx /proc/self/fd/1 # the address holds a token
    echo "On your computer, with the login host's name as you know it:"
    if [ -n "${OPEN:-}" ]; then
        echo "    ssh -N -L $port:$host:$port $login"
        set -- "$@" --ip 0.0.0.0
    else
        echo "    ssh -N -L $port:localhost:$port -J $login ${login%@*}@$host"
    fi
    echo "Then open the address below there. It ends with the job: scancel $SLURM_JOB_ID"
    set -- "$@" --no-browser --port "$port"
fi
exec "$python" -m course_lib.authoring.cli "$@"
