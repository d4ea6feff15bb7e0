"""The batch script of a run under Slurm: one agent per node, told in time, requeued on 75 and on nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.launch.submission import AGAIN, NEVER_AGAIN, Submission, header


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """`time` as Slurm spells it. `output`: where all it says goes, `%j` is the job. `more`: options of sbatch, as `--qos=high`."""

    time: str
    output: str
    partition: str = ""
    account: str = ""
    more: Sequence[str] = ()


def sbatch_script(submission: Submission, options: SlurmOptions) -> str:
    """The whole script. The same arguments give the same bytes."""
    lines = ["#!/bin/bash", *header(submission), *_directives(submission, options), "", _BODY.format(**_words(submission))]
    return "\n".join(lines)


def _directives(submission: Submission, options: SlurmOptions) -> list[str]:
    told = {
        "job-name": submission.name,
        "nodes": str(submission.num_nodes),
        "ntasks-per-node": "1",
        "time": options.time,
        "signal": f"USR2@{submission.notice_s}",
        "open-mode": "append",
        "output": options.output,
        "partition": options.partition,
        "account": options.account,
        "cpus-per-task": str(submission.num_cpus or ""),
        "gpus-per-node": str(submission.num_gpus or ""),
        "mem": f"{-(-submission.memory_bytes // (1 << 20))}M" if submission.memory_bytes else "",
        "exclude": ",".join(submission.denied),
    }
    set_ones = [f"#SBATCH --{name}={value}" for name, value in told.items() if value]
    return [*set_ones, "#SBATCH --requeue", *(f"#SBATCH {option}" for option in options.more)]


def _words(submission: Submission) -> dict[str, object]:
    program = shlex.join(shlex.split(submission.program))
    return {
        "notice_s": submission.notice_s,
        "program": program,
        "train": f"{program} {shlex.join(submission.train_arguments())}",
        "run_dir": shlex.quote(submission.run_dir),
        "max_requeues": submission.max_requeues,
        "again": AGAIN,
        "never": ", ".join(map(str, NEVER_AGAIN)),
    }


# A detached process sets the start: while this script lives its job cannot be made eligible, and afterwards nothing of it is left to do so.
_BODY = """\
# USR2 comes {notice_s} s before the time is over, to the agents and not to this shell: they save and end with {again}.
# The job then requeues itself, so a run that is longer than the time limit is a chain of jobs of one id.
export SUREFOOT_ONE_AGENT_PER_NODE=1
restarts=${{SLURM_RESTART_COUNT:-0}}
echo "surefoot: job $SLURM_JOB_ID, start $((restarts + 1)), on $SLURM_JOB_NODELIST"

# In the background: bash answers a signal only between two commands, and waits for this one as long as it lives.
trap : TERM
srun --kill-on-bad-exit=1 --wait=60 {train} &
step=$!
while :; do
  wait "$step"
  code=$?
  kill -0 "$step" 2>/dev/null || break
done

# {again} is worth a retry. {never} are not: what they say must be looked at first, and what a signal ended was Slurm's to decide.
if [ "$code" -ne {again} ]; then
  exit "$code"
fi
if [ "$restarts" -ge {max_requeues} ]; then
  echo "surefoot: requeued $restarts times, which is the limit"
  exit "$code"
fi
# A job that somebody cancels ends with {again} too, and must not come back.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
if [ "$state" != RUNNING ]; then
  echo "surefoot: not requeued by itself: the job is ${{state:-gone}}"
  exit "$code"
fi
denied=$({program} submit denied {run_dir})

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
"""
