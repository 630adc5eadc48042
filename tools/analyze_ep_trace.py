"""What ran when in a kernel trace of expert parallelism, and what ran at the same time: picture, text, JSON.

    python tools/analyze_ep_trace.py TRACE... [--out FILE_OR_DIRECTORY] [--iterations 0-2,7] [--json] [--no-picture]

Reads Chrome / Perfetto JSON (.json, .json.gz): MORI's kernel profiler (v1, v1_ll, async_ll, intranode), this suite's
traces, torch.profiler's. Exit code 2 for wrong usage and for a trace that can't be read; the other traces are analyzed.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

try:
    import numpy as np
except ImportError:
    print("analyze_ep_trace: numpy is needed: pip install numpy", file=sys.stderr)
    sys.exit(2)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a command of its own: runs from anywhere

from lib.talk import say
from lib.trace import MAX_BYTES, Ints, Trace, TraceError, TraceTooLarge, read_trace
from tools.ready_python import how_to_get
from tools.trace_analysis import Analysis, Windows, analyze, find_iterations
from tools.trace_lanes import spans_of
from tools.trace_names import is_anchor
from tools.trace_report import across_traces, as_document, as_text

Drawing = Callable[[Analysis, Sequence[int], Path], None]
EXIT_OK, EXIT_USAGE = 0, 2
SUFFIXES = (".png", ".svg")
DRAWN_IN_FULL, DRAWN_FIRST, DRAWN_SLOWEST = 6, 3, 3  # subplots: all of them, or the first and the slowest ones


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        chosen = _chosen_iterations(options.iterations)
        pictures = {} if options.no_picture else _picture_paths(options.traces, options.out)
        draw = None if options.no_picture else _drawing()
    except ValueError as error:
        return _complain(str(error))
    analyses: list[Analysis] = []
    drawn: dict[Path, Path] = {}
    for path in options.traces:
        try:
            analysis = analyze_file(path, chosen)
            shown = shown_iterations(analysis)
            analyses.append(analysis)
            if draw is not None:
                _draw_to(draw, analysis, shown, pictures[path])
                drawn[path] = pictures[path]
        except (TraceError, ValueError) as error:
            _complain(str(error))
        if not options.json and analyses and analyses[-1].spans.path == path:
            print(("\n" if len(analyses) > 1 else "") + as_text(analyses[-1], shown, drawn.get(path)))
    print(as_document(analyses, drawn) if options.json else across_traces(analyses), end="")
    complete = len(analyses) == len(options.traces) and (draw is None or len(drawn) == len(analyses))
    return EXIT_OK if complete else EXIT_USAGE


def _draw_to(draw: Drawing, analysis: Analysis, iterations: list[int], picture: Path) -> None:
    try:
        draw(analysis, iterations, picture)
    except OSError as error:
        raise ValueError(f"{picture} can't be written: {error.strerror or error}") from error


def _drawing() -> Drawing:
    try:
        from tools.trace_plot import draw
    except ImportError as error:
        needs = f"{error.name or 'matplotlib'} is needed to draw"
        raise ValueError(f"{needs}: {how_to_get('matplotlib')}, or use --no-picture") from error
    return draw


def analyze_file(path: Path, chosen: list[tuple[int, int]] | None, max_bytes: int = MAX_BYTES) -> Analysis:
    """Read and analyze one trace. Raises TraceError, and ValueError if it has none of the chosen iterations.

    A file above max_bytes is read twice: for what bounds iterations, then for the iterations asked for.
    """
    try:
        trace = read_trace(path, max_bytes=max_bytes)
        spans = spans_of(trace)
        _expect_spans(trace, len(spans.start_us))
        windows = find_iterations(spans)
        numbers = _numbers(chosen, len(windows.start_us), path)
    except TraceTooLarge as error:
        if chosen is None:
            raise TraceTooLarge(f"{error}: choose a part of it, e.g. --iterations 0-2") from error
        windows = _find_in_large(path)
        numbers = _numbers(chosen, len(windows.start_us), path)
        after = int(numbers[-1]) + 1
        until = float(windows.start_us[after]) if after < len(windows.start_us) else float("inf")
        trace = read_trace(path, window_us=(float(windows.start_us[numbers[0]]), until), max_bytes=None)
        spans = spans_of(trace)
    return analyze(spans, windows, numbers)


def _find_in_large(path: Path) -> Windows:
    spans = spans_of(read_trace(path, keep=is_anchor, max_bytes=None))
    if not len(spans.start_us) and not len(spans.marks.group):
        raise TraceError(f"{path} is too large to be read whole, and nothing in it marks iterations")
    return find_iterations(spans)


def _expect_spans(trace: Trace, count: int) -> None:
    if not count:
        broken = f" ({trace.complaint})" if trace.complaint else ""
        raise TraceError(f"{trace.path} holds {trace.events} events but no spans of time{broken}")


def _numbers(chosen: list[tuple[int, int]] | None, count: int, path: Path) -> Ints:
    if chosen is None:
        return np.arange(count)
    asked = np.unique([i for low, high in chosen for i in range(low, min(high, count - 1) + 1)]).astype(np.int64)
    if not len(asked):
        raise ValueError(f"--iterations: {path} has iterations 0-{count - 1}")
    return asked


def shown_iterations(analysis: Analysis) -> list[int]:
    """The iterations that get a subplot and a table: all chosen ones if few, else the first and the slowest."""
    chosen = analysis.chosen
    if len(chosen) <= DRAWN_IN_FULL:
        return chosen.tolist()
    rest = chosen[DRAWN_FIRST:]
    slowest = rest[np.argsort(-analysis.windows.duration_us[rest], kind="stable")[:DRAWN_SLOWEST]]
    return sorted([*chosen[:DRAWN_FIRST].tolist(), *slowest.tolist()])


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser("analyze_ep_trace.py", description=description, epilog=rest.partition("Reads")[2])
    parser.add_argument("traces", metavar="TRACE", nargs="+", type=Path, help="one file a rank")
    parser.add_argument("--out", help="picture (.png or .svg), or a directory for them; default: PNG beside the trace")
    parser.add_argument("--iterations", metavar="LIST", help="only these, counted from 0, e.g. 0-2,7")
    parser.add_argument("--json", action="store_true", help="JSON on stdout in place of the text")
    parser.add_argument("--no-picture", action="store_true", help="draw nothing; needs no matplotlib")
    return parser.parse_args(arguments)


def _chosen_iterations(told: str | None) -> list[tuple[int, int]] | None:
    if told is None:
        return None
    chosen = []
    for part in told.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or int(high or low) < int(low):
            raise ValueError(f"--iterations {told}: {part!r} is no number or range, write e.g. 0-2,7")
        chosen.append((int(low), int(high or low)))
    return chosen


def _picture_paths(traces: list[Path], out: str | None) -> dict[Path, Path]:
    """Where each trace's picture goes. Raises ValueError if two would go to one file."""
    names = {trace: trace.name.removesuffix(".gz").removesuffix(".json") + ".png" for trace in traces}
    if out is None:
        pictures = {trace: trace.parent / name for trace, name in names.items()}
    elif out.endswith(os.sep) or Path(out).is_dir():
        pictures = {trace: Path(out) / name for trace, name in names.items()}
    elif Path(out).suffix.lower() not in SUFFIXES:
        raise ValueError(f"--out {out}: ends in {' or '.join(SUFFIXES)}, or is a directory")
    elif len(traces) > 1:
        raise ValueError(f"--out {out}: is one file for {len(traces)} traces, give a directory")
    else:
        pictures = {traces[0]: Path(out)}
    if len(set(pictures.values())) < len(traces):
        raise ValueError("two of the traces would have one picture: give each trace once, or no --out directory")
    absent = [picture.parent for picture in pictures.values() if out and not picture.parent.is_dir()]
    if absent:
        raise ValueError(f"--out {out}: there is no directory {absent[0]}")
    return pictures


def _complain(sentence: str) -> int:
    say(f"analyze_ep_trace: {sentence}")
    return EXIT_USAGE


def _command() -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no such letter gets a question mark
    try:
        code = main()
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # the reader of our output has seen enough
        code = EXIT_OK
    except OSError as error:
        code = _complain(f"{error.filename or 'the output'} can't be written: {error.strerror or error}")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter tries once more as it ends
    return code


if __name__ == "__main__":
    sys.exit(_command())
