#!/bin/bash
#SBATCH --job-name=gsm8k
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=h100:8
#SBATCH --cpus-per-task=2
#SBATCH --mem=200G
#SBATCH --time=480
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -u
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
cd /workspace || exit 1

# Sent five minutes before the time limit: the run saves a checkpoint, and the job is requeued.
over=0
trap 'over=1; kill -TERM "$step"' USR1
for attempt in $(seq 0 3); do
  echo "attempt $attempt"
  srun --kill-on-bad-exit=1 grpo-jax train gsm8k.yaml --run_dir /mnt/runs/runs/gsm8k --distributed auto &
  step=$!
  wait "$step"
  status=$?
  if [ $over = 1 ]; then
    wait "$step"
    scontrol requeue "$SLURM_JOB_ID"
    exit
  fi
  if [ $status = 0 ]; then exit 0; fi
done
exit "$status"
