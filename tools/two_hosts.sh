#!/usr/bin/env bash
# Run the commands of docs/guides/many_gpus.md for two hosts and a server on a third, as they stand there, on this
# machine: each host is a network namespace. Kills one host, by ending its processes and then by cutting its network,
# and resumes the run. Prints what happened, as a line of JSON for each.
#
#     bash tools/two_hosts.sh [WORK_DIR]
#
# Needs a synced checkout and user namespaces, but no root rights, no GPU and no vLLM (a double stands in for it).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=${1:-$(mktemp -d)}
cd "$root"
for how in processes network; do
    .venv/bin/python packages/testing/src/plumbob/testing/hosts.py "$work/$how" docs/guides/many_gpus.md --kill $how
done
