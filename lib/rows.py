"""The row schema, and its files: CSV for people, JSONL with everything, both appended row by row.

A row is on disk when `RowFiles.append` returns. JSONL is written first, so a CSV line always has its record, and a
resumed run can add a CSV line that a kill left out.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
COLUMNS = tuple(
    """
    schema stamp section variant comm compute_kernel algo timing status reason world nodes tokens num_experts
    topk hidden inter dispatch_dtype combine_dtype num_sms layout handle transport routing routing_sha
    load_max_over_mean seed warmup iters iters_per_graph lat_us_p50 lat_us_mean lat_us_min lat_us_p90 lat_us_p99
    lat_us_max quant_us dispatch_us experts_us combine_us stage_us forward_us kernel_us host_us gap_us skew_us
    slowest_rank launch_bound tokens_per_s tflops dispatch_bytes_selection dispatch_bytes_dedup
    dispatch_bytes_wire combine_bytes_selection combine_bytes_dedup combine_bytes_wire node_bytes_algo
    node_bytes_physical dispatch_dedup_gbps combine_dedup_gbps dispatch_wire_gbps combine_wire_gbps
    wire_gbps_min wire_gbps_min_rank sol_us sol_pct sol_bound peak_source acc_loss_pct check graph l2
    quant_included staging_included timer sm_clk_mhz_min throttled contended tainted device versions git repro
    """.split()
)
NOT_RUN = ("skipped", "missing", "unsupported")  # a verdict reached without running anything
STATUSES = ("ok", "wrong", "failed", "timeout", "interrupted", "skipped", "missing", "unsupported")
AGAIN = ("interrupted", "failed", "timeout")  # what a resumed run does once more; `wrong` stays as evidence
# Words that pandas.read_csv takes for a missing value (pandas/_libs/parsers.pyx, STR_NA_VALUES); "" means it here too.
READ_AS_MISSING = frozenset(
    "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null".split("|")
)
csv.field_size_limit(16_000_000)  # characters; a reason holds a library's words whole, and csv's own limit is 131072
SIX_DIGITS_BELOW = 1e5  # above it, `:.6g` would turn to an exponent


class SchemaError(Exception):
    """A file whose header is not this schema's, or a line that is not a row or record."""


class LockedError(Exception):
    """Another run is writing these files."""


class WriteError(Exception):
    """The disk refused a row; what was there before stands, and `line` is the row that was not saved."""

    def __init__(self, path: Path, error: OSError, line: str) -> None:
        super().__init__(f"OUT_DIR={path.parent}: cannot write {path.name} ({error.strerror})")
        self.line = line


def cell(value: object) -> str:
    """One CSV cell: blank for None, 1/0 for a boolean, six significant digits for a float."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError("a cell is blank where a figure does not apply, never nan or inf")
        return f"{value:.6g}" if abs(value) < SIX_DIGITS_BELOW else f"{value:.1f}"
    text = " ".join(str(value).split())
    if text in READ_AS_MISSING:
        raise ValueError(f"pandas reads {text!r} as a missing value")
    return text


def csv_line(row: Mapping[str, object]) -> str:
    unknown = set(row) - set(COLUMNS)
    if unknown:
        raise KeyError(f"not a column: {', '.join(sorted(unknown))}")
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([cell(row.get(name)) for name in COLUMNS])
    return out.getvalue()


HEADER = ",".join(COLUMNS) + "\n"


def _append(path: Path, descriptor: int, text: str) -> None:
    """One write, one fsync; a refused write is taken back, so that no torn line is left. Raises OSError."""
    if not path.exists():  # a file that was removed takes lines without a word, and loses them
        raise FileNotFoundError(errno.ENOENT, "the file was removed")
    size = os.fstat(descriptor).st_size
    data = text.encode()
    try:
        while data:  # a full disk may take a part first; the next write then tells why
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _whole_lines(path: Path) -> tuple[list[str], bool]:
    """The complete lines of a file, and whether a torn one follows them."""
    text = path.read_text(errors="replace") if path.exists() else ""
    *lines, tail = text.split("\n")
    return lines, bool(tail)


def read_records(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """JSONL records of a file, and whether a torn last line was dropped."""
    lines, torn = _whole_lines(path)
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            _check_record(record)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SchemaError(f"{path}: line {number} is not a record; mend it, or start a new run") from error
        records.append(record)
    return records, torn


def _check_record(record: Any) -> None:
    """Raises ValueError, KeyError or TypeError on one that `append` did not write."""
    key, row = record["key"], record["row"]
    if not isinstance(key, str) or not isinstance(row, dict) or row["status"] not in STATUSES:
        raise TypeError("key, row or status")
    csv_line(row)


def read_rows(path: Path) -> tuple[list[dict[str, str]], bool]:
    """CSV rows of a file, and whether a torn last line was dropped. Raises SchemaError on another header or row."""
    lines, torn = _whole_lines(path)
    if not lines or lines[0] + "\n" != HEADER:
        raise SchemaError(f"{path}: its header is not that of schema {SCHEMA}; it was written by another version")
    return dict_rows(path, lines), torn


def dict_rows(path: Path, lines: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of CSV lines, the header first; None where a line lacks a cell. Raises SchemaError on a huge cell."""
    rows = csv.DictReader(lines)
    try:
        return list(rows)
    except csv.Error as error:
        number = rows.reader.line_num
        raise SchemaError(f"{path}: line {number} is not a row ({error}); mend it or leave it out") from error


class RowFiles:
    """The CSV and JSONL of one section of one run. `notices` says what opening them had to mend."""

    def __init__(self, folder: Path, prefix: str, stamp: str, section: str) -> None:
        stem = f"{prefix}_{stamp}_{section}"
        self.csv, self.jsonl, self.log = (folder / f"{stem}.{kind}" for kind in ("csv", "jsonl", "log"))
        self.notices: list[str] = []
        self.done: dict[str, str] = {}  # case key -> status

    def open(self, resume: bool, planned: Collection[str] = ()) -> None:
        """`planned`: keys of the cases that this run will make; their interrupted rows are dropped.

        Raises FileExistsError unless resuming, SchemaError on another schema, LockedError beside a running run.
        """
        if not resume:
            for path in (self.csv, self.jsonl):
                if path.exists():
                    raise FileExistsError(path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        try:
            self._csv = os.open(self.csv, flags, 0o644)
            self._jsonl = os.open(self.jsonl, flags, 0o644)
            fcntl.flock(self._csv, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if HEADER.startswith(self.csv.read_text(errors="replace")):  # empty, or cut short in its first line
                os.ftruncate(self._csv, 0)
                _append(self.csv, self._csv, HEADER)
        except BlockingIOError as error:
            raise LockedError(f"{self.csv} is being written by another run") from error
        except OSError as error:
            raise WriteError(self.csv, error, "(none yet)") from error
        self._mend(planned)

    def _mend(self, planned: Collection[str]) -> None:
        """Drop torn and interrupted lines, add CSV lines that a kill left out, and learn which cases are there."""
        rows, torn_csv = read_rows(self.csv)
        records, torn_jsonl = read_records(self.jsonl)
        if torn_csv:
            self.notices.append(f"{self.csv.name}: a torn last line was dropped")
        if torn_jsonl:
            self.notices.append(f"{self.jsonl.name}: a torn last line was dropped")
        if len(rows) > len(records) + torn_jsonl:
            raise SchemaError(
                f"{self.csv}: has {len(rows)} rows, {self.jsonl.name} knows of {len(records)}; bring it back"
            )
        outstanding = {record["key"] for record in records if record["row"]["status"] in AGAIN}
        again = outstanding.intersection(planned)
        kept = [record for record in records if record["key"] not in again]
        if again:
            self.notices.append(f"{len(again)} cases that failed or were cut short are run again")
        if left := len(outstanding) - len(again):
            self.notices.append(f"{left} outstanding cases are not in this plan and stay: resume with that run's knobs")
        if len(kept) < len(records) or torn_csv or torn_jsonl or len(rows) != len(records):
            self._rewrite(self.jsonl, "_jsonl", "".join(record_line(record) for record in kept))
            self._rewrite(self.csv, "_csv", HEADER + "".join(csv_line(record["row"]) for record in kept))
        self.done = {record["key"]: record["row"]["status"] for record in kept}

    def _rewrite(self, path: Path, attribute: str, text: str) -> None:
        """Replace a file whole: the new one is complete on disk before it takes the old one's name."""
        fresh = path.with_name(f".{path.name}.new")
        try:
            with fresh.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise WriteError(path, error, "(none: the files were being mended, and stand as they were)") from error
        descriptor = os.open(fresh, os.O_RDWR | os.O_APPEND)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.replace(path)
        os.close(getattr(self, attribute))
        setattr(self, attribute, descriptor)

    def append(self, row: Mapping[str, object], key: str, record: Mapping[str, object]) -> None:
        """Save one row. Raises WriteError when the disk refuses it."""
        whole, line = record_line({"key": key, "row": row, **record}), csv_line(row)  # a bad value saves neither
        path = self.jsonl
        try:
            _append(path, self._jsonl, whole)
            path = self.csv
            _append(path, self._csv, line)
        except OSError as error:
            raise WriteError(path, error, line) from error
        self.done[key] = str(row["status"])

    def close(self) -> None:
        os.close(self._csv)
        os.close(self._jsonl)


def record_line(record: Mapping[str, object]) -> str:
    return json.dumps(record, allow_nan=False, sort_keys=False) + "\n"
