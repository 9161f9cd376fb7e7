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
from tests.tiny_decoders import build_tiny_classifier
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
# Of decoders that do not sample.
PREFILL = (
    "procengine.embed_outputs",
    "procengine.label_activations",
    "procengine.label_head",
    "procengine.models.label_weights",
    "procengine.open_sequence",
    "procengine.pair_template",
    "procengine.prefill_runner",
    "procengine.reranker_scores",
    "procengine.text_scores",
    "procengine.workflows.embed",
    "procengine.workflows.hidden_states",
    "procengine.workflows.prefill_only",
    "procengine.workflows.score",
    "procengine.workflows.score_text",
)
SAMPLING = (
    "procengine.runner",
    "procengine.logits_state",
    "procengine.slot_state",
    "procengine.workflows.generate",
    "procengine.input_builder",
    "procengine.scheduler.scheduler",
    "procengine.text_outputs",
)
# What the three kinds of processes do for requests of some workflows, in one, and what is loaded then.
CODE = """
import sys, msgspec, numpy as np
from procengine.config import EngineConfig
from procengine.messages import EmbedInput
from procengine.workflows import find_workflow, load_part
from procengine.workflows.parts import WorkflowParts
config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
asked = sys.argv[2].split(",")
parts = WorkflowParts(config.model.workflows)
assert set(asked) <= set(parts)
for name in asked:
    parts[name]
    load_part(find_workflow(name).postprocess)
if config.model.encoder is not None:
    from procengine.encoder_device import open_device
else:
    from procengine.device import open_device
device = open_device(config, shows_progress=False)
ids = np.array([0, 0, 0, 3, 2, 9, 3, 0, 1, 2], np.int32)
for name in asked:
    if name != "generate":
        (output,) = device.run(EmbedInput(1, 0, 1, 3, 3, (2, 2, 3, 3, 0), name, (0,)), ids)
        assert output.wait().size
print(*sorted(sys.modules))
"""


def loaded(folder: Path, *asked: str, **options: object) -> set[str]:
    args = msgspec.convert({"model": str(folder), "threads": 1, "num_blocks": 8, **options}, EngineArgs)
    config = msgspec.json.encode(resolve(args))
    done = subprocess.run(
        [sys.executable, "-c", CODE, config, ",".join(asked)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_an_encoder_loads_nothing_of_generation(tmp_path: Path) -> None:
    folder = save_encoder(build_tiny_encoder("bert", "ForSequenceClassification", num_labels=2), tmp_path)
    modules = loaded(folder, "embed", "classify")
    assert not modules & {*GENERATION, "torch"}
    assert modules >= set(ENCODING)


def test_generation_loads_nothing_of_encoders_nor_of_what_does_not_sample(tmp_path: Path) -> None:
    modules = loaded(save_folder(build_tiny_model("llama"), tmp_path), "generate", max_num_seqs=4)
    assert not modules & {*ENCODING, *PREFILL, "torch"}
    assert modules >= set(GENERATION) - {"procengine.kernels.kv_cache"}


def test_decoders_with_labels_load_nothing_that_samples(tmp_path: Path) -> None:
    folder = save_folder(build_tiny_classifier("llama", "SequenceClassification", 1), tmp_path)
    modules = loaded(folder, "classify", "reward", "score", max_num_seqs=4)
    assert not modules & {*SAMPLING, *ENCODING[:-1], "torch", "procengine.text_scores"}
    assert modules >= {"procengine.label_head", "procengine.prefill_runner"}


def test_texts_are_scored_by_native_kernels_without_torch(tmp_path: Path) -> None:
    folder = save_folder(build_tiny_model("llama"), tmp_path)
    modules = loaded(folder, "score_text", max_num_seqs=4)
    assert not modules & {*ENCODING, "torch", "procengine.label_head"}
