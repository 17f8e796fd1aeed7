"""The harness of the integration suites serves these too."""

import os
import sys

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(TESTS, "integration"), os.path.join(TESTS, "fault")]
