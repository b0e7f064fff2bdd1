#!/usr/bin/env bash
# tools/bench/trainer.py on one GPU: both arms, 0.5B full and LoRA, 1.5B full. About six minutes.
#
#     PYTHON=python3 bash tools/gpu/trainer_bench.sh [OUTPUT_DIR]
#
# Needs plumbob and TRL 1.16 importable by $PYTHON.
set -euo pipefail
out=${1:-/tmp/trainer_bench}
mkdir -p "$out"
cases=0.5b:full:plumbob,0.5b:full:trl,0.5b:lora:plumbob,0.5b:lora:trl,1.5b:full:plumbob,1.5b:full:trl
${PYTHON:-python3} tools/bench/trainer.py --cases "${CASES:-$cases}" --steps "${STEPS:-6}" --json "$out/trainer.json"
