#!/usr/bin/env bash
# The variants of run.sh over all points of SEQ_LENS, in one file a section. Knobs: ./run_sweep.sh --help
set -euo pipefail
exec "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/run.sh" --sweep "$@"
