#!/bin/bash
# Run this script in the directory of the run file.
set -eu
tpu() { gcloud compute tpus tpu-vm "$@" --zone=us-west4-a; }

if ! tpu describe gsm8k >/dev/null 2>&1; then
  tpu create gsm8k --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite
fi
tpu ssh gsm8k --worker=all --command='mkdir -p /workspace'
tpu scp --recurse --worker=all ./* gsm8k:/workspace
for attempt in $(seq 0 3); do
  echo "attempt $attempt"
  if tpu ssh gsm8k --worker=all --command='cd /workspace && grpo-jax train gsm8k.yaml --run_dir /mnt/runs/runs/gsm8k --distributed auto'; then
    echo "done; the slice is still there: gcloud compute tpus tpu-vm delete gsm8k --zone=us-west4-a"
    exit 0
  fi
done
exit 1
