"""The harness of the integration suites serves these too."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "integration")]


def pytest_terminal_summary(terminalreporter):
    """How soon all pools were free, for each test: load reports add up to 0.3 s."""
    from cluster import QUIET

    tests = {}
    for test, seconds, lease in QUIET:
        tests.setdefault(test, []).append((seconds, lease))
    for test, values in tests.items():
        seconds, lease = max(values)
        after = f", after {lease:.2f} s for a lease" if lease else ""
        terminalreporter.write_line(f"all pools free within {seconds:.2f} s{after}: {test}")
