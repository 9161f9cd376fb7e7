"""A group loads what its workflows need and no more: encoders without generation, generation without encoders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from procengine.engine_args import EngineArgs
from procengine.kernels.native import library
from procengine.resolve import resolve
from tests.e2e.tiny_folders import build_tiny_model, save_folder
from tests.tiny_encoders import build_tiny_encoder, save_encoder

pytestmark = pytest.mark.skipif(not library.is_available(), reason="native kernels are not built")

ENCODING = (
    "procengine.encoder_device",
    "procengine.encoder_runner",
    "procengine.kernels.encoder",
    "procengine.models.encoder_weights",
    "procengine.models.packed_encoder",
    "procengine.label_scores",
    "procengine.workflows.classify",
)
GENERATION = (
    "procengine.device",
    "procengine.runner",
    "procengine.kernels.decoder",
    "procengine.kernels.sampling",
    "procengine.kernels.kv_cache",
    "procengine.kv_tensors",
    "procengine.native_executor",
    "procengine.models.packed_llama",
    "procengine.workflows.generate",
    "procengine.input_builder",
    "procengine.scheduler.scheduler",
    "procengine.text_outputs",
)
# What the three kinds of processes do with their workflows, in one, and what is loaded then.
CODE = """
import sys, msgspec, numpy as np
from procengine.config import EngineConfig
from procengine.messages import EmbedInput
from procengine.workflows import find_workflow, load_part
from procengine.workflows.parts import load_frontend_parts
config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
for name in config.model.workflows:
    load_frontend_parts(name)
    load_part(find_workflow(name).postprocess)
if config.model.encoder is not None:
    from procengine.encoder_device import open_device
else:
    from procengine.device import open_device
device = open_device(config, shows_progress=False)
if config.model.encoder is not None:
    ids = np.array([0, 0, 0, 3, 2, 9, 3, 0, 1, 2], np.int32)
    for name in ("embed", "classify"):
        (output,) = device.run(EmbedInput(1, 0, 1, 3, 3, (2, 2, 3, 3, 0), name, (0,)), ids)
        assert output.wait().shape[0] == 1
print(*sorted(sys.modules))
"""


def loaded(folder: Path, **options: object) -> set[str]:
    args = msgspec.convert({"model": str(folder), "threads": 1, "num_blocks": 8, **options}, EngineArgs)
    config = msgspec.json.encode(resolve(args))
    done = subprocess.run([sys.executable, "-c", CODE, config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_an_encoder_loads_nothing_of_generation(tmp_path: Path) -> None:
    folder = save_encoder(build_tiny_encoder("bert", "ForSequenceClassification", num_labels=2), tmp_path)
    modules = loaded(folder)
    assert not modules & {*GENERATION, "torch"}
    assert modules >= set(ENCODING)


def test_generation_loads_nothing_of_encoders(tmp_path: Path) -> None:
    modules = loaded(save_folder(build_tiny_model("llama"), tmp_path), max_num_seqs=4)
    assert not modules & {*ENCODING, "torch"}
    assert modules >= set(GENERATION) - {"procengine.kernels.kv_cache"}
