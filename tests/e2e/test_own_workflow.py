"""The workflow of docs/WORKFLOWS.md, installed as a package of its own, through a whole group."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from procengine import LLM, InvalidRequestError
from procengine.workflows import installed_workflows
from tests.tiny_encoders import build_tiny_encoder, save_encoder

DOCUMENT = Path(__file__).parents[2] / "docs" / "WORKFLOWS.md"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's module, with the metadata that an installer would write, for us and our children."""
    code = re.search(r"```python\n(# vector_length\.py.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "vector_length.py").write_text(code[1])
    info = tmp_path / "vector_length-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vector-length\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[procengine.workflows]\nvector_length = vector_length:WORKFLOW\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    installed_workflows.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_workflow_of_another_package_runs(tmp_path: Path) -> None:
    folder = save_encoder(build_tiny_encoder("bert"), tmp_path / "model")
    with LLM(str(folder), kernels="torch", threads=1, max_num_seqs=8) as llm:
        (length,), (squared,) = (
            llm.ask("vector_length", [{"prompt": "the cat", **options}])[0] for options in ({}, {"squared": True})
        )
        vector = llm.embed("the cat", use_tqdm=False)[0].embedding
        assert squared == pytest.approx(length**2, rel=1e-5)
        assert squared == pytest.approx(sum(x * x for x in vector), rel=1e-5)
        with pytest.raises(InvalidRequestError, match="unknown field `cubed`"):
            llm.ask("vector_length", [{"prompt": "the cat", "cubed": True}])
    installed_workflows.cache_clear()
