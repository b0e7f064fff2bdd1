#!/usr/bin/env bash
# Run tools/bench/trainer.py on one GPU: plumbob and TRL, with 0.5B full, 0.5B LoRA and 1.5B full. Takes six minutes.
#
#     PYTHON=python3 bash tools/gpu/trainer_bench.sh [OUTPUT_DIR] [trainer.py's options]
#
# Needs plumbob and TRL 1.16 importable by $PYTHON. On a GPU of 80 GB, add `--trl-microbatch 32` for 1.5B.
set -euo pipefail
out=${1:-/tmp/trainer_bench}
mkdir -p "$out"
cases=0.5b:full:plumbob,0.5b:full:trl,0.5b:lora:plumbob,0.5b:lora:trl,1.5b:full:plumbob,1.5b:full:trl
${PYTHON:-python3} tools/bench/trainer.py --cases "${CASES:-$cases}" --steps "${STEPS:-6}" --json "$out/trainer.json" "${@:2}"
