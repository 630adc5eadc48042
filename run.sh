#!/usr/bin/env bash
# One row per variant at a fixed TOKENS; run_sweep.sh is the same over SEQ_LENS. Knobs are environment variables:
# ./run.sh --help lists them, ./run.sh --plan shows every case with its verdict and runs nothing.
set -euo pipefail
# shellcheck source=lib/env.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/env.sh"

main() {
  parse_arguments "$@"
  find_bare_python
  check_knobs
  if [[ -z $FOLLOWER && ${CHECKED[dry_run]} != 1 ]]; then
    open_output  # before the set-up of .venv: a folder or a stamp that will not do is told at once
  fi
  choose_interpreters
  run_sections
  print_summary
  combine_statuses ${INTERRUPTED:+"$EXIT_INTERRUPTED"} "${STATUSES[@]}"
  exit "$REPLY"
}

parse_arguments() {
  PREFIX=bench
  local argument
  for argument in "$@"; do
    case $argument in
      --sweep) PREFIX=sweep ;;
      --plan) export DRY_RUN=1 ;;
      -h | --help) find_bare_python && exec "$BARE" -m lib.knobs help ;;
      *=*) die "$EXIT_USAGE" "$argument: knobs are environment variables, they stand before the command" ;;
      *) die "$EXIT_USAGE" "$argument: no such option; there are --plan and --help" ;;
    esac
  done
}

# CHECKED = what lib.knobs made of the environment; it has said what is wrong when it fails.
check_knobs() {
  local said line
  local -a sweep=()
  [[ $PREFIX != sweep ]] || sweep=(--sweep)
  said=$(trap '' INT && exec "$BARE" -m lib.knobs check ${sweep[@]+"${sweep[@]}"}) || exit
  declare -gA CHECKED=()
  while IFS= read -r line; do
    CHECKED[${line%%=*}]=${line#*=}
  done <<<"$said"
  # Several nodes, or one task a GPU: this script is started many times. All take part, the first one keeps the files.
  FOLLOWER=''
  if [[ ${CHECKED[follower]} == 1 ]]; then
    FOLLOWER=1
    export MOE_EP_FOLLOWER=1
  fi
  read -ra SECTIONS <<<"${CHECKED[sections]}"
  OUT_DIR=${CHECKED[out_dir]}
}

# PYTHON_OF = the interpreter of each section. The libraries of different sections exclude each other in one.
choose_interpreters() {
  local section knob value choose=choose_python
  [[ ${CHECKED[dry_run]} != 1 ]] || choose=choose_python_for_plan
  declare -gA PYTHON_OF=()
  MAIN_PYTHON=''
  for section in "${SECTIONS[@]}"; do
    case $section in
      comm) knob=COMM_PYTHON value=${CHECKED[comm_python]} ;;
      fi_mega) knob=FI_PYTHON value=${CHECKED[fi_python]} ;;
      *) knob=PYTHON value=${CHECKED[python]} ;;
    esac
    if [[ $value != "${CHECKED[python]}" ]]; then
      given_python "$knob" "$value" torch numpy
    elif [[ -n $MAIN_PYTHON ]]; then
      REPLY=$MAIN_PYTHON
    else
      "$choose" "$value"
      MAIN_PYTHON=$REPLY
    fi
    PYTHON_OF[$section]=$REPLY
  done
}

# The folder and the stamp of this run's files.
open_output() {
  prepare_output_dir
  trap release_claim EXIT
  if [[ -n ${CHECKED[resume]} ]]; then
    resume_stamp "$PREFIX" "${CHECKED[resume]}"
  else
    claim_stamp
  fi
  export MOE_EP_STAMP=$STAMP
}

run_sections() {
  local section
  export OUT_DIR MOE_EP_PREFIX=$PREFIX MOE_EP_SHELL_PID=$$
  STATUSES=()
  catch_signals
  for section in "${SECTIONS[@]}"; do
    run_section "$section" "${PYTHON_OF[$section]}"
    if [[ -n $INTERRUPTED && -n $STAMP && ! -e $OUT_DIR/${PREFIX}_${STAMP}_$section.csv ]]; then
      run_section "$section" "${PYTHON_OF[$section]}"  # the signal came before it could write: its rows are due
    fi
    if [[ $REPLY == "$EXIT_NOT_MET" ]]; then
      STATUSES+=("$((${#STATUSES[@]} > 0 ? 1 : EXIT_SET_UP))")
      break  # the nodes did not come together, and would not for the next section
    fi
    STATUSES+=("$REPLY")
    [[ $REPLY != "$EXIT_USAGE" || ${CHECKED[nnodes]:-1} == 1 ]] || break  # nodes that differ do so for every section
    [[ $REPLY != "$EXIT_LOCKED" ]] || break  # another run is at work on these files: do not measure beside it
  done
}

print_summary() {
  local section file
  local -a files=()
  [[ -n $STAMP ]] || return 0
  for section in "${SECTIONS[@]}"; do
    file=$OUT_DIR/${PREFIX}_${STAMP}_$section.csv
    [[ ! -e $file ]] || files+=("$file")
  done
  if [[ ${#files[@]} -gt 0 ]]; then
    "${MAIN_PYTHON:-$BARE}" -m lib.summary "${files[@]}" || say "no table: lib.summary failed; the rows are in $OUT_DIR"
    write_report "$OUT_DIR/report_$STAMP.html" "${files[@]}"
  fi
}

# write_report PAGE CSV...: a page beside the rows. It tells itself what it lacks (2); whatever it does, the run stands.
write_report() {
  "${MAIN_PYTHON:-$BARE}" -m tools.report --out "$1" "${@:2}" || [[ $? == "$EXIT_USAGE" ]] ||
    say "no page: tools.report failed; the rows are in $OUT_DIR"
}

main "$@"
