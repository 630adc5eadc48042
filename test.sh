#!/usr/bin/env bash
# The whole test suite: set-up, style, types, shell, then pytest. Any other argument goes to pytest.
#   ./test.sh            everything that needs no GPU
#   ./test.sh --setup    only make or refresh .venv
#   ./test.sh --gpu      the GPU tests, by PYTHON or what ./run.sh would take
set -euo pipefail
# shellcheck source=lib/env.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/env.sh"

main() {
  case ${1:-} in
    -h | --help) show_help ;;
    --setup) set_up ;;
    --gpu) run_gpu_tests "${@:2}" ;;
    *) run_all_tests "$@" ;;
  esac
}

show_help() {
  sed -n 's/^# \{0,1\}//p' "$ROOT/test.sh" | sed -n '2,5p'
}

set_up() {
  find_bare_python
  set_up_venv requirements.txt requirements-dev.txt
}

run_all_tests() {
  local -a failed=()
  set_up
  export PATH=$VENV/bin:$PATH
  check "style (ruff check)" ruff check
  check "format (ruff format --check; ruff format mends it)" ruff format --check
  check "types (mypy)" mypy
  check "shell (shellcheck)" check_shell
  # pytest comes last, also after a failure: its summary line closes the output.
  check "tests (pytest)" python -m pytest -q --durations=15 "$@"
  if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
  fi
}

# check NAME COMMAND...: a failure is remembered in `failed`, so that one run shows all there is to mend.
check() {
  say "== $1"
  "${@:2}" || failed+=("$1")
}

check_shell() {
  local -a scripts
  mapfile -t scripts < <(find . -name .venv -prune -o -name '*.sh' -print)
  shellcheck -x .ci/run "${scripts[@]}"
}

run_gpu_tests() {
  local python
  find_bare_python
  choose_python "${PYTHON:-}"
  python=$REPLY
  probe_all "$python" pytest pytest_timeout ||
    die "$EXIT_USAGE" "$python: pytest and pytest-timeout are needed;" \
      "run: $(printf '%q' "$python") -m pip install pytest pytest-timeout"
  exec "$python" -m pytest -q -m gpu "$@"
}

main "$@"
