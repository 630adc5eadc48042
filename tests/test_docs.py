"""The documentation says what the code does: columns, knobs, exit codes, commands and links."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from knob_helpers import BLACKWELL, CPU, HOPPER, parsed
from machine_helpers import cpu

from bench import ref
from lib import section, timing
from lib.knob_help import EXIT_CODES, markdown_table
from lib.knobs import KNOBS, KnobErrors, MachineFacts, parse_knobs
from lib.plan import make_plan
from lib.rows import COLUMNS, SCHEMA, STATUSES
from lib.section import Run

ROOT = Path(__file__).resolve().parent.parent
README, METHOD = ROOT / "README.md", ROOT / "docs" / "method.md"
COLUMNS_MD = (ROOT / "docs" / "columns.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NIGHTLY_EXIT = 3  # of nightly.sh and compare

# Named in the documentation with a value, and read by others: launchers, libraries, the system.
FOREIGN = {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PATH", "HOME", "LC_ALL", "LANG", "DP", "EP", "TP"}
FOREIGN_PREFIXES = ("LOCAL_", "GROUP_", "SLURM_", "NCCL_", "NVSHMEM_", "GLOO_", "TORCH_", "TORCHELASTIC_", "MOE_EP_")


def needs(path: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not path.exists(), reason=f"{path.name} is not written yet")


# -- columns.md


def table(text: str, first_heading: str) -> list[list[str]]:
    """Rows of every markdown table whose first heading is this, cells stripped."""
    rows, inside = [], False
    for line in text.splitlines():
        cells = [part.strip() for part in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == first_heading:
            inside = True
        elif inside and not set(line) <= set("|- "):
            rows.append(cells)
    return rows


COLUMN_ROWS = {row[0].strip("`"): row for row in table(COLUMNS_MD, "column")}


def test_the_columns_are_documented_once_each_and_in_order() -> None:
    documented = [row[0] for row in table(COLUMNS_MD, "column")]
    assert documented == [f"`{name}`" for name in COLUMNS]
    assert f"(schema {SCHEMA})" in COLUMNS_MD


def test_every_column_tells_kind_type_definition_and_when_it_is_blank() -> None:
    for name, row in COLUMN_ROWS.items():
        assert len(row) == 5, name
        assert all(row), name
        assert row[1] in ("input", "label", "verdict", "measure"), name


def test_a_unit_in_a_name_is_the_unit_of_its_type() -> None:
    units = {"us": ", us", "gbps": ", GB/s", "pct": ", %", "bytes": ", bytes"}
    for name, row in COLUMN_ROWS.items():
        for part, unit in units.items():
            if part in name.split("_") and not name.endswith("_rank"):
                assert row[2].endswith(unit), name


def known_before_running() -> set[str]:
    """What a row holds of a case that never ran."""
    knobs = parsed()
    (case, *_) = make_plan(ref.SECTION, knobs, cpu(), False)
    run = SimpleNamespace(section=ref.SECTION, knobs=knobs, machine=cpu(), stamp="S", git="g0")
    return set(Run.case_columns(run, case))  # type: ignore[arg-type]


def test_inputs_and_labels_are_exactly_what_is_known_without_running() -> None:
    assert {name for name, row in COLUMN_ROWS.items() if row[1] in ("input", "label")} == known_before_running()


def test_the_statuses_are_documented_in_the_codes_order() -> None:
    assert [row[0] for row in table(COLUMNS_MD, "status")] == [f"`{status}`" for status in STATUSES]


# -- the README


@needs(README)
def test_the_readme_holds_the_generated_knob_table() -> None:
    assert markdown_table() in README.read_text(), "put the output of `python -m lib.knobs markdown` there"


def test_exit_codes_are_those_of_the_code() -> None:
    constants = {value for name, value in vars(section).items() if name.endswith("_EXIT")}
    assert {code for code, _ in EXIT_CODES} == constants | {NIGHTLY_EXIT}


@needs(README)
def test_the_readme_documents_every_exit_code() -> None:
    block = README.read_text().lower().partition("exit codes")[2]
    told = {int(code) for code in re.findall(r"^\|\s*`?(\d+)`?\s*\|", block, re.MULTILINE)}
    assert told == {code for code, _ in EXIT_CODES}


def code_spans(text: str) -> Iterator[str]:
    yield from re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", outside)


def assigned_names(text: str) -> set[str]:
    return {name for span in code_spans(text) for name in re.findall(r"(?<![\w.])([A-Z][A-Z0-9_]+)=", span)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_knob_that_a_document_sets_exists(path: Path) -> None:
    known = {knob.name for knob in KNOBS} | FOREIGN
    unknown = {name for name in assigned_names(path.read_text()) - known if not name.startswith(FOREIGN_PREFIXES)}
    assert unknown == set()


def test_a_misspelt_knob_in_a_document_would_be_found() -> None:
    text = "Use `TOKNES=8 ./run.sh`, or\n\n```bash\nSECTION=ref SEQ_LENGTHS='1 2' ./run_sweep.sh\n```\nnot PLAIN=1 text"
    assert assigned_names(text) == {"TOKNES", "SECTION", "SEQ_LENGTHS"}


def commands(text: str) -> list[str]:
    """Lines of bash blocks that start run.sh or run_sweep.sh, continued lines joined."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.search(r"^(\w+=\S.*\s)?\./run(_sweep)?\.sh\b", line)]


def refusal(line: str) -> list[str]:
    """What the knobs say to a documented command: [] if a CPU, a Hopper or a Blackwell machine takes it."""
    words = shlex.split(line, comments=True)
    command = next(index for index, word in enumerate(words) if word.startswith("./run"))
    env = dict(word.split("=", 1) for word in words[:command])
    for name in ("PYTHON", "COMM_PYTHON", "FI_PYTHON"):
        if name in env:
            env[name] = sys.executable  # a reader's interpreter is not here
    answers = [knob_errors(env, facts, words[command] == "./run_sweep.sh") for facts in (CPU, HOPPER, BLACKWELL)]
    return [] if [] in answers else answers[0]


def knob_errors(env: dict[str, str], facts: MachineFacts, sweep: bool) -> list[str]:
    try:
        parse_knobs(env, facts, sweep)
    except KnobErrors as wrong:
        return wrong.errors
    return []


@needs(README)
def test_every_command_of_the_readme_is_accepted() -> None:
    lines = commands(README.read_text())
    assert lines, "the README shows at least one command"
    assert {line: said for line in lines if (said := refusal(line))} == {}


def test_a_command_that_does_not_work_would_be_found() -> None:
    text = '```bash\n./run.sh\nSECTION=fi_mga ./run.sh  # no such\nSEQ_LENS="8 x" \\\n  ./run_sweep.sh\ncd x\n```\n'
    lines = commands(text)
    assert [bool(refusal(line)) for line in lines] == [False, True, True]


# -- all documents


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        leads_to = path.parent / file if file else path
        if not leads_to.exists() or (anchor and anchor not in anchors(leads_to.read_text())):
            dead.append(target)
    assert dead == []


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", timing.METHODS)
def test_every_timing_method_is_defined_in_method_md(name: str) -> None:
    text = METHOD.read_text()
    heading = rf"^#+ .*\b{name}\b"
    bold = rf"\*\*`?{name}`?\*\*"
    assert re.search(f"{heading}|{bold}", text, re.MULTILINE)


# -- figures in the README and in docs/method.md


def shown_rows() -> list[tuple[str, dict[str, str]]]:
    """Every row of a table that names the CSV it was made from."""
    found = []
    text = README.read_text() + METHOD.read_text()
    for part in text.split("<!-- rows: ")[1:]:
        name, _, rest = part.partition(" -->")
        lines = [line for line in rest.partition("<!-- end of rows -->")[0].splitlines() if line.startswith("|")]
        titles, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]
        found += [(name, dict(zip(titles, row, strict=True))) for row in rows]
    return found


FIGURES = {
    "p50 us": "lat_us_p50",
    "dispatch us": "dispatch_us",
    "experts us": "experts_us",
    "combine us": "combine_us",
    "stage us": "stage_us",
    "forward us": "forward_us",
    "host us": "host_us",
    "least us": "sol_us",
    "SM MHz": "sm_clk_mhz_min",
    "wire GB/s": "dispatch_wire_gbps",
    "kernel us": "kernel_us",
    "TFLOP/s": "tflops",
    "acc loss %": "acc_loss_pct",
    "% of light": "sol_pct",
}


@needs(README)
def test_every_figure_of_a_table_is_in_the_committed_csv_that_it_names() -> None:
    rows = shown_rows()
    assert len(rows) >= 30
    for name, shown in rows:
        measured = pd.read_csv(ROOT / name)
        same = (measured["variant"] == shown["variant"]) & (measured["tokens"] == int(shown["tokens"]))
        same &= (measured["timing"] == shown["timing"]) & (measured["status"] == "ok")
        if "dispatch" in shown:
            same &= measured["dispatch_dtype"] == shown["dispatch"]
        row = measured[same].iloc[0]
        for title, column in FIGURES.items():
            if title in shown:
                digits = len(shown[title].partition(".")[2])
                assert shown[title] == f"{row[column]:.{digits}f}", (name, shown["variant"], title)
