"""The harness of the integration suites serves these too."""

import os
import sys

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "integration"))


@pytest.fixture(scope="module")
def model():
    """SmolLM2's file, fetched as `baton up` does."""
    from cluster import smollm2

    path = smollm2(fetch=True)
    if path is None:
        pytest.skip("SmolLM2 cannot be fetched: offline? (its messages are above)")
    return path
