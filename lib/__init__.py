"""How a number is made: knobs, plan, worker groups, timing, checks, rows. Names no library and no section."""

import signal
import sys

if sys.argv[:1] == ["-m"]:  # `python -m lib.knobs` and its like import this first: Ctrl-C ends them without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
