"""Fixtures that more than one test file uses."""

from __future__ import annotations

from harness import scenarios

__all__ = ["scenarios"]
