#!/bin/bash
# Made by surefoot 0.1.0:
#   surefoot submit slurm /shared/run.toml --nodes 4
#SBATCH --job-name=quickstart
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=USR2@137
#SBATCH --open-mode=append
#SBATCH --output=/shared/quickstart-%j.out
#SBATCH --partition=long
#SBATCH --account=lab
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --mem=524288M
#SBATCH --exclude=n3,n7
#SBATCH --requeue
#SBATCH --qos=high

# USR2 comes 137 s before the time is over, to the agents and not to this shell: they save and end with 75.
# The job then requeues itself, so a run that is longer than the time limit is a chain of jobs of one id.
export SUREFOOT_ONE_AGENT_PER_NODE=1
restarts=${SLURM_RESTART_COUNT:-0}
echo "surefoot: job $SLURM_JOB_ID, start $((restarts + 1)), on $SLURM_JOB_NODELIST"

# In the background: bash answers a signal only between two commands, and waits for this one as long as it lives.
trap : TERM
srun --kill-on-bad-exit=1 --wait=60 surefoot train /shared/run.toml launch.nodes=2:4 'run.name=it'"'"'s' &
step=$!
while :; do
  wait "$step"
  code=$?
  kill -0 "$step" 2>/dev/null || break
done

# 75 is worth a retry. 1, 2, 3, 4, 5, 6, 7, 93 are not: what they say must be looked at first, and what a signal ended was Slurm's to decide.
if [ "$code" -ne 75 ]; then
  exit "$code"
fi
if [ "$restarts" -ge 100 ]; then
  echo "surefoot: requeued $restarts times, which is the limit"
  exit "$code"
fi
# A job that somebody cancels ends with 75 too, and must not come back.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
if [ "$state" != RUNNING ]; then
  echo "surefoot: not requeued by itself: the job is ${state:-gone}"
  exit "$code"
fi
denied=$(surefoot submit denied '/shared/runs/quick start')

# Slurm lets a requeued job wait until its credential has expired (two minutes), unless somebody sets its start.
setsid --fork bash -c '
  trap "" TERM
  for _ in $(seq 200); do
    if scontrol show job "$1" | grep -q Reason=BeginTime; then
      [ -z "$2" ] || scontrol update JobId="$1" ExcNodeList="$2"
      scontrol update JobId="$1" StartTime=now && break
    fi
    sleep 0.3
  done' surefoot "$SLURM_JOB_ID" "$denied" </dev/null >/dev/null 2>&1
echo "surefoot: requeued"
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
