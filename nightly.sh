#!/usr/bin/env bash
# A night: the sweep of run_sweep.sh in several process starts, held against the accepted baseline (docs/nightly.md).
#   ./nightly.sh                  measure and judge; the last line on stdout is the verdict, the exit code too
#   ./nightly.sh --accept [STAMP] the nights so far, or those from STAMP on, become this machine's baseline
#   ./nightly.sh --status         the last night's line again; red if that night is too old
# Knobs are those of run_sweep.sh, and BASELINE, STARTS, KEEP: ./run.sh --help lists them.
set -euo pipefail
# shellcheck source=lib/env.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/env.sh"

readonly EXIT_RED=3
JUDGED='' NIGHTS=''  # NIGHTS: OUT_DIR, once it is known to be one

main() {
  parse_arguments "$@"
  find_bare_python
  [[ $TASK != night ]] || trap without_verdict EXIT
  check_knobs
  if [[ $TASK == status ]]; then
    exec "$BARE" -m lib.nightly status "$OUT_DIR" "$(stamp_now)"
  fi
  if [[ ${CHECKED[dry_run]} == 1 ]]; then
    cd -- "$CALLER_DIR" && RESUME='' exec "$ROOT/run_sweep.sh" --plan
  fi
  prepare_output_dir
  NIGHTS=$OUT_DIR
  take_lock
  if [[ $TASK == accept ]]; then
    exec "$BARE" -m lib.nightly accept "$OUT_DIR" "$SINCE"
  fi
  preflight
  NIGHT=$("$BARE" -m lib.nightly begin "$OUT_DIR" "$(stamp_now)" "${CHECKED[resume]}")
  catch_signals
  run_starts
  "$BARE" -m lib.nightly gather "$OUT_DIR" "$NIGHT"
  run_suspects_again
  judge
}

# A night that ends before its verdict, for whatever reason, is a red line on stdout, and --status's until a night has one.
# shellcheck disable=SC2329  # by the trap
without_verdict() {
  local code=$?
  if [[ -z $JUDGED && $code != "$EXIT_LOCKED" ]]; then
    "$BARE" -m lib.nightly failed "$NIGHTS" "$(stamp_now)" "$code" || true
  fi
  exit "$code"
}

parse_arguments() {
  TASK=night SINCE=''
  case ${1:-} in
    '') ;;
    --accept) TASK='accept' SINCE=${2:-} ;;
    --status) TASK=status ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$ROOT/nightly.sh" && exit ;;
    *) die "$EXIT_USAGE" "$1: no such option; there are --accept, --status and --help" ;;
  esac
  [[ -z $SINCE || $SINCE =~ ^[0-9]{8}T[0-9]{6}Z(-[0-9]+)?$ ]] ||
    die "$EXIT_USAGE" "--accept $SINCE: must be a night's stamp like 20261130T190000Z"
  [[ $# -le 1 || ($TASK == accept && $# -eq 2) ]] || die "$EXIT_USAGE" "too many words; ./nightly.sh --help"
}

check_knobs() {
  local said line
  said=$(trap '' INT && exec "$BARE" -m lib.nightly check) || exit
  declare -gA CHECKED=()
  while IFS= read -r line; do
    CHECKED[${line%%=*}]=${line#*=}
  done <<<"$said"
  OUT_DIR=${CHECKED[out_dir]}
}

stamp_now() {
  date -u +%Y%m%dT%H%M%SZ
}

# One nightly at a time in OUT_DIR. File descriptor 9 stays open in the sweeps too: while one outlives a killed nightly,
# the next one must not measure beside it.
take_lock() {
  [[ -f $OUT_DIR/.nightly.lock || ! -e $OUT_DIR/.nightly.lock ]] ||
    die "$EXIT_USAGE" "OUT_DIR=$OUT_DIR: .nightly.lock is no file; remove it"
  exec 9>>"$OUT_DIR/.nightly.lock"
  "$BARE" -m lib.nightly lock 9
}

# What would spoil the night is told before it: disk, neighbours, clocks, BASELINE; then interpreters, by the dry run.
preflight() {
  "$BARE" -m lib.nightly preflight "$OUT_DIR"
  (cd -- "$CALLER_DIR" && RESUME='' exec "$ROOT/run_sweep.sh" --plan) >/dev/null
}

run_starts() {
  local start said
  local -a words
  for ((start = 1; start <= CHECKED[starts]; start++)); do
    said=$("$BARE" -m lib.nightly words "$start") || exit
    IFS=$'\t' read -ra words <<<"$said"
    run_start "$start" ${words[@]+"${words[@]}"}
  done
}

# run_start NAME WORD...: one sweep in a folder of its own, gone on with if a killed night left a part of it.
run_start() {
  local folder=$OUT_DIR/night_$NIGHT/$1 resume=''
  [[ ! -e $folder/exit ]] || return 0
  mkdir -p -- "$folder" || die "$EXIT_USAGE" "OUT_DIR=$OUT_DIR: cannot be written"
  [[ -z $(OUT_DIR=$folder list_stamps sweep) ]] || resume=last
  say "night $NIGHT, start $1${resume:+, gone on with}"
  run_sweep "${@:2}" OUT_DIR="$folder" RESUME=$resume
  case $REPLY in
    0 | 1 | "$EXIT_SET_UP")
      [[ $REPLY != 1 ]] || "$BARE" -m lib.nightly room "$folder" || exit
      printf '%s\n' "$REPLY" >"$folder/exit" || die "$EXIT_USAGE" "OUT_DIR=$OUT_DIR: full, or gone"
      ;;
    2 | "$EXIT_LOCKED" | "$EXIT_INTERRUPTED") exit "$REPLY" ;;  # it has said why
    *) die "$EXIT_RED" "the sweep of start $1 ended with $REPLY; the next call goes on with this night" ;;
  esac
}

# run_sweep WORD...: REPLY = its exit status. In a process group of its own, as a section is (lib/env.sh).
run_sweep() {
  set -m
  (cd -- "$CALLER_DIR" && exec env -u BASELINE -u STARTS -u KEEP "$@" "$ROOT/run_sweep.sh") </dev/null >&2 &
  SECTION_PID=$!
  set +m
  wait_for_section
  [[ -z $INTERRUPTED ]] || exit "$EXIT_INTERRUPTED"
}

# A row that looks slower or failed gets as many starts once more before it is believed; one sweep a section and start.
run_suspects_again() {
  local start line said
  local -a lines words
  said=$("$BARE" -m lib.nightly suspects "$OUT_DIR" "$NIGHT" "${CHECKED[baseline]}") || exit
  [[ -n $said ]] || return 0
  mapfile -t lines <<<"$said"
  for ((start = 1; start <= CHECKED[starts]; start++)); do
    for line in "${lines[@]}"; do
      IFS=$'\t' read -ra words <<<"$line"
      run_start "again-$start-${words[0]#SECTION=}" "${words[@]}"
    done
  done
  "$BARE" -m lib.nightly gather "$OUT_DIR" "$NIGHT"
}

judge() {
  local verdict=0
  "$BARE" -m lib.nightly judge "$OUT_DIR" "$NIGHT" "${CHECKED[baseline]}" || verdict=$?
  [[ ! -e $OUT_DIR/verdicts_$NIGHT.json ]] || JUDGED=1
  write_report
  "$BARE" -m lib.nightly prune "$OUT_DIR" "${CHECKED[keep]}" || [[ $verdict != 0 ]] || verdict=$EXIT_SET_UP
  exit "$verdict"
}

# A page of all nights kept. It tells itself what it lacks; the verdict stands, and stays the last line on stdout.
write_report() {
  choose_python_for_plan "${CHECKED[python]}"
  "$REPLY" -m tools.report "$OUT_DIR" --out "$OUT_DIR/report_$NIGHT.html" >&2 ||
    say "no page: tools.report failed; the verdicts are in $OUT_DIR/verdicts_$NIGHT.json"
}

main "$@"
