"""Makes the plain PyTorch backend's whole call 50 % slower, in every interpreter that finds this on PYTHONPATH.

The product has no such hook: Python imports `sitecustomize` by itself, and this one waits for the backend's module.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

MODULE = "bench.backends.torch_a2a"
FACTOR = float(os.environ.get("MOE_EP_TEST_SLOWER", "1.5"))


class Slower(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            slow_down(module.TorchSession)

        spec.loader.exec_module = exec_module
        return spec


def slow_down(session):
    call = session.call

    def slow(self) -> None:
        begin = time.perf_counter()
        call(self)
        until = begin + (time.perf_counter() - begin) * FACTOR
        while time.perf_counter() < until:  # a sleep would overshoot by the scheduler's whim
            continue

    session.call = slow


sys.meta_path.insert(0, Slower())
