"""A copy of the entry scripts whose Python side is a few stand-in lines: what is under test is bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRY_SCRIPTS = ["run.sh", "run_sweep.sh", "test.sh", ".ci/run"]
SCRIPTS = [*ENTRY_SCRIPTS, "lib/env.sh"]

KNOBS = """
import os, sys
if sys.argv[1] == "help":
    sys.exit(print("the help text"))
if os.environ.get("WRONG"):
    sys.exit(print("TOPK=0: must be 1..8", file=sys.stderr) or 2)
get = os.environ.get
caller, python = os.environ["MOE_EP_CALLER_DIR"], get("PYTHON", "")
lines = dict(sections=get("SECTION", "ref"), python=python, comm_python=get("COMM_PYTHON") or python,
             fi_python=get("FI_PYTHON") or python, out_dir=os.path.join(caller, get("OUT_DIR") or "results"),
             dry_run=get("DRY_RUN", "0"), resume=get("RESUME", ""), debug="0")
print("\\n".join(f"{name}={value}" for name, value in lines.items()))
"""
SECTION = """
import os, signal, sys, time
name, get = __spec__.name.split(".")[-1], os.environ.get
status = int(get(f"STATUS_{name}", "0"))
if get("DRY_RUN") == "1":
    sys.exit(print("plan", name, "bare" if get("MOE_EP_BARE") else "ready"))
if get("MOE_EP_INTERRUPTED"):
    status = 130
elif get("HANG") == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("hanging", flush=True)
    time.sleep(0.5)
elif get("HANG"):
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print("hanging", flush=True)
        time.sleep(20)
    except KeyboardInterrupt:
        time.sleep(0.2)
        status = 130
print("ran", name, "by", get("FAKE", "real"), "follower" if get("MOE_EP_FOLLOWER") else "leader", flush=True)
if get("MOE_EP_STAMP"):
    section = "vllm_split" if name == "split" else name
    path = os.path.join(get("OUT_DIR"), f"{get('MOE_EP_PREFIX')}_{get('MOE_EP_STAMP')}_{section}.csv")
    open(path, "a").write(f"{status}\\n")
os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
"""
SUMMARY = "import os, sys\nprint('table', *(os.path.basename(path) for path in sys.argv[1:]))\n"
REPORT = """
import os, sys
print("page", *(os.path.basename(path) for path in sys.argv[2:]))
sys.exit(int(os.environ.get("STATUS_report", "0")))
"""

# Answers the probe as told, and is otherwise the real interpreter. `-m venv` makes an interpreter of the same kind,
# whose modules come with `-m pip`.
FAKE = """#!/bin/bash
export FAKE={name}
here=$(dirname -- "$0")
missing='{missing}'
if [[ -e $here/installed ]]; then missing=''; fi
case "$1 $2" in
  "-c "*ensurepip*) exit {ensurepip} ;;
  "-c "*flock*) ;;
  "-c "*) if [[ $3 == pip ]]; then missing=''; fi; printf '%s\\n' {version} {age} "$missing" "$0"; exit ;;
  "-m venv") mkdir -p "$3/bin"; sed 's/^export FAKE=.*/export FAKE=venv/' "$0" >"$3/bin/python"
             chmod +x "$3/bin/python"; exit ;;
  "-m pip") printf 'Collecting torch-9\\nchatter\\n'; echo pip >>"{calls}"; sleep {pip_s}
            [[ {pip} != 0 ]] || touch "$here/installed"; exit {pip} ;;
esac
exec "{real}" "$@"
"""


class Clone:
    """A copy of the scripts in a folder with spaces, with a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.bin = folder / "bin dir"
        self.calls = folder / "pip calls"
        self.results = folder / "out dir"
        for name in ("lib", "bench", "tools", ".ci"):
            (self.root / name).mkdir(parents=True)
        self.bin.mkdir()
        for script in SCRIPTS:
            shutil.copy(ROOT / script, self.root / script)
        (self.root / "requirements.txt").write_text("torch==9\n")
        (self.root / "lib/knobs.py").write_text(KNOBS)
        (self.root / "lib/summary.py").write_text(SUMMARY)
        (self.root / "tools/report.py").write_text(REPORT)
        for name in ("ref", "split", "vllm_mega", "fi_mega", "comm"):
            (self.root / f"bench/{name}.py").write_text(SECTION)

    def fake(self, name: str, missing: str = "", version: str = "3.11", pip: int = 0, **more: object) -> Path:
        path = self.bin / name
        age = "old" if version in ("2.7", "3.9") else "new"
        values = {"ensurepip": 0, "pip_s": 0, **more, "calls": self.calls, "real": sys.executable}
        path.write_text(FAKE.format(name=name, missing=missing, version=version, age=age, pip=pip, **values))
        path.chmod(0o755)
        return path

    def environment(self, **knobs: str) -> dict[str, str]:
        return {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": "/", "OUT_DIR": str(self.results), **knobs}

    def run(self, *arguments: str, script: str = "run.sh", **knobs: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / script), *arguments],
            env=self.environment(**knobs),
            cwd=self.root.parent,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    def files(self) -> list[str]:
        return sorted(path.name for path in self.results.iterdir())
