"""What is measured: one script a section, one adapter a library."""

import os
import signal
import sys

if sys.argv[:1] == ["-m"]:  # `python -m bench.ref` imports this first
    for number in (signal.SIGINT, signal.SIGTERM):  # until the coordinator listens, a signal ends it without a word
        signal.signal(number, lambda *_: os._exit(130))
