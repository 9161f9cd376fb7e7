"""What schemathesis makes of the served OpenAPI document: no answer that says that the server is at fault.

It is no dependency, and conflicts with some: have it on the PATH (`pipx install schemathesis`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api.http_client import HttpClient
from tests.procs.canary import Canary
from tests.procs.harness import Served

_SECONDS = 60


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whatever_fits_the_document_or_not_is_no_error_of_ours(serve: Callable[..., Served], tmp_path: Path) -> None:
    schemathesis = shutil.which("schemathesis")
    if schemathesis is None:
        pytest.skip("no schemathesis on the PATH (pipx install schemathesis)")
    group = serve("--port", 0, "--max-model-len", 256)
    assert HttpClient(group.ready["http"]).get("/top").status == 200  # from then on its memory is mapped
    canary = Canary.of(group, 200)
    # Not every text that fits a type is a request: ranges are not in the document.
    options = ("--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--warnings", "off")
    times = ("--max-time", str(_SECONDS), "--request-timeout", "60")
    url = f"{group.ready['http']}/openapi.json"
    command = [schemathesis, "run", url, *options, *times]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may be another Python's
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    canary.check()
