# shellcheck shell=bash
# What the entry scripts share: strict mode, messages, the choice and set-up of interpreters, output folder, stamps.
# Sourced, never run. Needs bash >= 4.2, coreutils and findutils; any path may contain spaces.
# A function that has a result leaves it in REPLY: in a $(subshell) bash drops `set -e` and die() would not end the run.
set -euo pipefail
export LC_ALL=C        # a comma as decimal point breaks printf, sort and CSV
unset CDPATH           # makes `cd` print
unset PYTHONSAFEPATH PYTHONINSPECT PYTHONOPTIMIZE  # hide the repository; wait for a person; drop what --help shows
unset MOE_EP_STAMP MOE_EP_FOLLOWER MOE_EP_BARE MOE_EP_INTERRUPTED MOE_EP_SHELL_PID  # words to the sections, ours alone

readonly EXIT_USAGE=2 EXIT_SET_UP=4 EXIT_NOT_MET=5 EXIT_LOCKED=75 EXIT_INTERRUPTED=130

# A closed stdout or stderr would be handed to the next file that is opened; a reader that went away ends no measurement.
[[ -e /dev/fd/1 ]] || exec >/dev/null
[[ -e /dev/fd/2 ]] || exec 2>/dev/null
trap '' PIPE
trap 'exit "$EXIT_INTERRUPTED"' INT TERM  # until sections run: catch_signals

CALLER_DIR=$PWD  # where the user stands: relative knobs start there
ROOT=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
readonly CALLER_DIR ROOT VENV=$ROOT/.venv
export MOE_EP_CALLER_DIR=$CALLER_DIR
cd -- "$ROOT"

# --- messages: talk goes to stderr, results to stdout -----------------------------------------------------------------

say() {
  printf '%s\n' "$*" >&2 2>/dev/null || true
}

# die STATUS SENTENCE
die() {
  local status=$1
  shift
  say "$@"
  exit "$status"
}

[[ $CALLER_DIR$ROOT != *$'\n'* ]] || die "$EXIT_USAGE" "a folder has a line end in its name; go to another, or rename it"

# --- interpreters -----------------------------------------------------------------------------------------------------

# Runs on any Python since 2.6. find_spec does not import (torch takes seconds); a folder left behind by an uninstall
# has no origin. The base executable skips a version manager's shim (60 ms a start) and outlives a .venv made anew.
readonly PROBE_CODE='
import os, sys
new = sys.version_info >= (3, 10)
missing = []
if new:
    from importlib.util import find_spec
    for name in sys.argv[1:]:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            missing.append(name)
base = getattr(sys, "_base_executable", "") or sys.executable
print("%d.%d" % sys.version_info[:2])
print("new" if new else "old")
print(" ".join(missing))
print(base if os.access(base, os.X_OK) else sys.executable)
'

# probe INTERPRETER MODULE...: true if it starts and is >= 3.10; PROBED = version, new|old, missing modules, executable.
probe() {
  mapfile -t PROBED < <(trap '' INT && exec "$1" -c "$PROBE_CODE" "${@:2}" 2>/dev/null </dev/null)
  [[ ${#PROBED[@]} -eq 4 && ${PROBED[1]} == new ]]
}

# probe_all INTERPRETER MODULE...: true if nothing is missing either.
probe_all() {
  probe "$@" && [[ -z ${PROBED[2]} ]]
}

# locate_python VALUE: the path that a name on PATH, or a path relative to the caller, stands for.
locate_python() {
  case $1 in
    /*) REPLY=$1 ;;
    */*) REPLY=$CALLER_DIR/$1 ;;
    *) REPLY=$(type -P -- "$1") || return 1 ;;
  esac
  [[ -f $REPLY && -x $REPLY ]]
}

# find_bare_python: BARE = a Python >= 3.10 for work that needs nothing but the standard library.
find_bare_python() {
  local path
  local -a candidates
  mapfile -t candidates < <(type -aP python3 python)
  if [[ -n ${PYTHON:-} ]] && locate_python "$PYTHON"; then
    candidates=("$REPLY" ${candidates[@]+"${candidates[@]}"})
  fi
  for path in ${candidates[@]+"${candidates[@]}"}; do
    if probe "$path"; then
      BARE=${PROBED[3]}
      return
    fi
  done
  die "$EXIT_SET_UP" "no Python >= 3.10 on PATH (looked for python3 and python): install one, or set PYTHON"
}

# given_python KNOB VALUE MODULE...: an interpreter that a knob names is used as it is, or refused in one sentence.
given_python() {
  local knob=$1 value=$2
  shift 2
  locate_python "$value" || die "$EXIT_USAGE" "$knob=$value: there is no such interpreter"
  if ! probe "$REPLY" "$@"; then
    [[ ${#PROBED[@]} -eq 4 ]] || die "$EXIT_USAGE" "$knob=$value: does not start as a Python interpreter"
    die "$EXIT_USAGE" "$knob=$value: is Python ${PROBED[0]}, 3.10 or newer is needed"
  fi
  [[ -z ${PROBED[2]} ]] || die "$EXIT_USAGE" "$knob=$value: ${PROBED[2]// / and } not installed there;" \
    "run: $(printf '%q' "$REPLY") -m pip install ${PROBED[2]}"
}

# python_on_path MODULE...: what `python3` or `python` starts, if it has all modules (a vLLM or FlashInfer container).
python_on_path() {
  local name
  for name in python3 python; do
    if locate_python "$name" && probe_all "$REPLY" "$@"; then
      return 0
    fi
  done
  return 1
}

# choose_python VALUE: the interpreter of PYTHON=VALUE; if unset, one on PATH that is ready; else .venv, made if need be.
choose_python() {
  if [[ -n $1 ]]; then
    given_python PYTHON "$1" torch numpy
  elif python_on_path torch numpy; then
    say "interpreter: $REPLY (on PATH, has torch and numpy)"
  else
    set_up_venv requirements.txt
    REPLY=$VENV/bin/python
  fi
}

# choose_python_for_plan VALUE: as choose_python, but nothing is installed; the bare interpreter can plan as well.
choose_python_for_plan() {
  if [[ -n $1 ]] || python_on_path torch numpy || venv_has requirements.txt; then
    choose_python "$1"
  else
    export MOE_EP_BARE=1
    REPLY=$BARE
  fi
}

# --- .venv ------------------------------------------------------------------------------------------------------------
# .venv/.incomplete exists while a set-up is under way or was cut short; .venv/.installed-<file> is a copy of each
# requirements file as it was installed, written last.

# venv_has FILE...: true if a finished set-up has installed exactly these requirements files, and it still works.
venv_has() {
  local file
  [[ ! -e $VENV/.incomplete ]] || return 1
  for file in "$@"; do
    [[ -f $VENV/.installed-$file && $(<"$VENV/.installed-$file") == "$(<"$ROOT/$file")" ]] || return 1
  done
  probe_all "$VENV/bin/python" torch numpy
}

# set_up_venv FILE...: one process at a time; the others wait and find the work done.
set_up_venv() {
  if venv_has "$@"; then
    return
  fi
  if ! mkdir -p -- "$VENV" || ! : >>"$VENV/.lock"; then
    die "$EXIT_SET_UP" "$VENV: cannot be written; set PYTHON to an interpreter with torch and numpy"
  fi
  (
    lock_fd_9
    venv_has "$@" || build_venv "$@"
  ) 9>>"$VENV/.lock"
}

# The lock belongs to the open file, so it lasts until its last holder ends, however it ends. Python takes it because
# flock(1) is not everywhere. A file system without locks (Lustre's default) is said, and is no reason to stop.
lock_fd_9() {
  "$BARE" -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.stderr.write("another run is setting up .venv: waiting for it\n")
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError as error:
    sys.stderr.write("no lock on .venv (%s): do not start two first runs at once\n" % error.strerror)
'
}

# build_venv FILE...: installs over what is there; makes it anew if a set-up was cut short or the interpreter is gone.
build_venv() {
  local file log=$VENV/set-up.log
  if [[ -e $VENV/.incomplete ]] || ! probe_all "$VENV/bin/python" pip; then
    "$BARE" -c 'import ensurepip, venv' 2>/dev/null || die "$EXIT_SET_UP" "$BARE cannot make a virtual environment:" \
      "install the package python3-venv (apt-get install python3-venv), or set PYTHON to an interpreter with torch and numpy"
    say "setting up $VENV: a new virtual environment (log: $log)"
    : >"$VENV/.incomplete"
    find "$VENV/" -mindepth 1 -maxdepth 1 ! -name .incomplete ! -name .lock -exec rm -rf -- {} +
    "$BARE" -m venv "$VENV" >"$log" 2>&1 || set_up_failed "$log"
  fi
  : >"$VENV/.incomplete"
  for file in "$@"; do
    say "setting up $VENV: installing $file, once; torch takes a minute or more"
    install_requirements "$ROOT/$file" "$log" || set_up_failed "$log"
    cp -- "$ROOT/$file" "$VENV/.installed-$file"
  done
  rm -- "$VENV/.incomplete"
  say "set-up done in $SECONDS s"
}

# install_requirements FILE LOG. PIP_USER=1 in someone's environment would make pip refuse a virtual environment.
install_requirements() {
  PIP_USER=0 "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input -r "$1" 2>&1 |
    tee -a -- "$2" | show_progress
}

# One line rewritten in place on a terminal, every second; elsewhere only what announces minutes of silence.
show_progress() {
  local line shown='' status
  while :; do
    status=0
    IFS= read -r -t 1 line || status=$?
    if ((status == 0)); then
      line=${line#"${line%%[! ]*}"}
      case $line in
        Collecting* | Downloading* | Installing*) shown=$line ;;
        *) continue ;;
      esac
      if [[ ! -t 2 && ($line == *torch-* || $line == Installing*) ]]; then
        printf '  %4d s  %.100s\n' "$SECONDS" "$line" >&2
      fi
    elif ((status <= 128)); then
      break  # the end; above 128: a second without a line
    fi
    [[ ! -t 2 ]] || printf '\r\033[K  %4d s  %.60s' "$SECONDS" "$shown" >&2
  done
  [[ ! -t 2 ]] || printf '\r\033[K' >&2
}

# set_up_failed LOG
set_up_failed() {
  tail -n 12 -- "$1" >&2
  die "$EXIT_SET_UP" "set-up of $VENV failed; the last lines of $1 are above; the next run starts it anew"
}

# --- output folder and stamp ------------------------------------------------------------------------------------------

# prepare_output_dir: OUT_DIR exists and has room for a test file, or the run ends before anything is measured.
prepare_output_dir() {
  local trouble test_file=$OUT_DIR/.write_test_$$
  if trouble=$(mkdir -p -- "$OUT_DIR" 2>&1) &&
    trouble=$({ head -c 65536 /dev/zero >"$test_file"; } 2>&1); then
    rm -- "$test_file"
    return
  fi
  rm -f -- "$test_file" 2>/dev/null || true
  [[ ! -e $OUT_DIR || -d $OUT_DIR ]] || trouble='Not a directory'
  die "$EXIT_USAGE" "OUT_DIR=$OUT_DIR: cannot be written (${trouble##*: }); give another one"
}

STAMP=''
CLAIM=''

# claim_stamp: STAMP = this second in UTC, with -2, -3 ... if another run has it; CLAIM = the file that says it is ours.
claim_stamp() {
  local second number=1
  second=$(date -u +%Y%m%dT%H%M%SZ)
  STAMP=$second
  until take_claim "$STAMP" && drop_claim_if_used "$STAMP"; do
    number=$((number + 1))
    ((number < 1000)) || die "$EXIT_USAGE" "OUT_DIR=$OUT_DIR: no free stamp at $second; give another one"
    STAMP=$second-$number
  done
}

# take_claim STAMP: noclobber makes creation exclusive. Claimed before the look for files, so that no other run can
# write and leave in between.
take_claim() {
  local claim=$OUT_DIR/.claim_$1
  (set -o noclobber && printf '%s %s\n' "$$" "$HOSTNAME" >"$claim") 2>/dev/null || return 1
  CLAIM=$claim
}

# drop_claim_if_used STAMP: true if no file carries the stamp; else the claim is given up.
drop_claim_if_used() {
  local file
  for file in "$OUT_DIR"/*_"$1"[_.]*; do
    if [[ -e $file ]]; then
      release_claim
      return 1
    fi
  done
}

release_claim() {
  if [[ -n $CLAIM ]]; then
    rm -f -- "$CLAIM"
    CLAIM=''
  fi
}

# resume_stamp PREFIX WANTED: STAMP = WANTED, or the newest for `last`; it must have rows, and nobody else at work on it.
resume_stamp() {
  local prefix=$1 wanted=$2 pid host
  STAMP=$wanted
  if [[ $wanted == last ]]; then
    STAMP=$(list_stamps "$prefix" | sort -t- -k1,1 -k2,2n | tail -n 1)
    [[ -n $STAMP ]] || die "$EXIT_USAGE" "RESUME=last: $OUT_DIR has no ${prefix}_<stamp>_*.csv to go on with"
  fi
  [[ $'\n'$(list_stamps "$prefix")$'\n' == *$'\n'"$STAMP"$'\n'* ]] ||
    die "$EXIT_USAGE" "RESUME=$wanted: $OUT_DIR has no ${prefix}_${STAMP}_*.csv to go on with; give last, or unset it"
  take_claim "$STAMP" && return
  read -r pid host <"$OUT_DIR/.claim_$STAMP" || true
  if [[ ${host:-} == "$HOSTNAME" && ${pid:-} =~ ^[0-9]+$ ]] && ! kill -0 "$pid" 2>/dev/null; then
    rm -f -- "$OUT_DIR/.claim_$STAMP"  # its run was killed
    take_claim "$STAMP" && return
  fi
  die "$EXIT_LOCKED" "RESUME=$wanted: process ${pid:-?} on ${host:-?} is writing $STAMP;" \
    "if that is gone, remove $OUT_DIR/.claim_$STAMP"
}

# list_stamps PREFIX: the stamps that have a CSV in OUT_DIR, one a line.
list_stamps() {
  local file name
  for file in "$OUT_DIR/$1"_*.csv; do
    name=${file##*/}
    name=${name#"$1"_}
    name=${name%%_*}
    if [[ $name =~ ^[0-9]{8}T[0-9]{6}Z(-[0-9]+)?$ ]]; then
      printf '%s\n' "$name"
    fi
  done
}

# --- sections ---------------------------------------------------------------------------------------------------------

# A section's coordinator gets each signal from here, once, and ends by itself when its rows are written: therefore it
# runs in a process group of its own (else Ctrl-C would hit it, torchrun and all ranks at the same moment), and this
# script waits on. An asynchronous command without `set -m` would ignore SIGINT for good.
INTERRUPTED=''
SECTION_PID=''
SIGNALLED=''

# catch_signals: from now on an interrupt no longer ends the run; the sections left write their rows as `interrupted`.
catch_signals() {
  trap forward_signal INT TERM HUP QUIT
}

forward_signal() {
  INTERRUPTED=1
  SIGNALLED=1
  if [[ -n $SECTION_PID ]]; then
    kill -s TERM "$SECTION_PID" 2>/dev/null || true  # it may have just ended; INT is a traceback while Python starts
  fi
}

# run_section SECTION INTERPRETER: REPLY = its exit status, made one of those that a section may have.
run_section() {
  local script=$1 told=$INTERRUPTED
  [[ $script != vllm_split ]] || script='split'
  [[ -z $told ]] || export MOE_EP_INTERRUPTED=1
  set -m
  "$2" -m "bench.$script" </dev/null &
  SECTION_PID=$!
  set +m
  if [[ $INTERRUPTED != "$told" ]]; then
    forward_signal  # came in while the section was being started
  fi
  wait_for_section
  case $REPLY in
    0 | 1 | 2 | "$EXIT_SET_UP" | "$EXIT_NOT_MET" | "$EXIT_LOCKED" | "$EXIT_INTERRUPTED") return ;;
  esac
  if [[ -n $INTERRUPTED ]]; then
    REPLY=$EXIT_INTERRUPTED
  else
    say "section $1 ended with status $REPLY (above 128: by signal $((REPLY - 128))): its rows may be incomplete"
    REPLY=1
  fi
}

# wait_for_section: REPLY = its exit status. A trapped signal cuts `wait` short, so wait again.
wait_for_section() {
  SIGNALLED=1
  while [[ -n $SIGNALLED ]]; do
    SIGNALLED=''
    REPLY=0
    wait "$SECTION_PID" || REPLY=$?
  done
  SECTION_PID=''
}

# combine_statuses STATUS...: REPLY = the exit status of the run: the gravest, but 4 only if nothing ran at all.
combine_statuses() {
  local status
  for REPLY in "$EXIT_INTERRUPTED" "$EXIT_LOCKED" "$EXIT_USAGE" 1 0; do
    for status in "$@"; do
      [[ $status != "$REPLY" ]] || return 0
    done
  done
  REPLY=$EXIT_SET_UP
}
