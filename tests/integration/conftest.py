"""Fixtures of the integration suites: clusters shared by the tests of one file, checked for leaks at the end."""

import pytest

from cluster import Cluster, tiny


@pytest.fixture(scope="module")
def cluster(request):
    """One prefill and one decode node; afterwards nothing may be left, and no warning in any log.

    Without prefix caches, so that what moves does not depend on the tests before; test_prefix_cache.py has them.
    """
    with Cluster(tiny("llama"), node=["--prefix-cache", "off"]) as c:
        yield c
        c.wait_idle()
        c.check_logs(allow=getattr(request.module, "EXPECTED_LOGS", ()))
