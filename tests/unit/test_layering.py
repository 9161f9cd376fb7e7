"""Import direction: who may import whom. Read from the syntax tree, so that lazy imports count too."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from procengine.workflows import WORKFLOWS

ROOT = Path(__file__).resolve().parents[2]

# What a module, and all below it, may import from ours. Modules that are not named are free.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "procengine.errors": (),
    "procengine.config": (),
    "procengine.messages": ("procengine.sampling_params",),
    "procengine.kernels": ("procengine.kernels", "procengine.errors"),
}

# What drives a device, above the models and below the worker, which opens `procengine.device` and nothing else.
RUNNERS = (
    "procengine.arrays",
    "procengine.host_arrays",
    "procengine.torch_arrays",
    "procengine.decode_graphs",
    "procengine.device_streams",
    "procengine.fetch_pool",
    "procengine.memory_profile",
    "procengine.nvtx_executor",
    "procengine.send_arena",
    "procengine.runner",
    "procengine.prefill_runner",
    "procengine.open_sequence",
    "procengine.text_scores",
    "procengine.label_head",
    "procengine.reranker_scores",
    "procengine.encoder_device",
    "procengine.encoder_model",
    "procengine.encoder_runner",
    "procengine.label_scores",
    "procengine.token_heads",
    "procengine.executor",
    "procengine.torch_executor",
    "procengine.warm_up",
    "procengine.native_executor",
    "procengine.logits_processors",
    "procengine.logits_state",
    "procengine.slot_state",
    "procengine.staging",
    "procengine.kv_tensors",
    "procengine.device",
)

# Where torch may be named at all. procs.worker is not among them: a mock worker never loads torch. Nor does a native
# one, as tests/e2e/test_native_worker.py sees.
TORCH_IN = ("procengine.kernels", "procengine.models", *RUNNERS)

# Who may import a module, or anything below it. Modules that are not named are free.
IMPORTED_BY: dict[str, tuple[str, ...]] = {
    # Two of its modules are free of torch and tell whether native kernels can run a model, a fact of the configuration.
    "procengine.kernels": (*TORCH_IN, "procengine.resolve", "procengine.decoder_sizes"),
    "procengine.models": ("procengine.models", *RUNNERS),
    **dict.fromkeys(RUNNERS, RUNNERS),
    "procengine.device": (*RUNNERS, "procengine.procs.worker"),
    "procengine.encoder_device": (*RUNNERS, "procengine.procs.worker"),
}

# Values in, values out: no clock, no input or output, no device, no process, no configuration object.
PURE = (
    "procengine.api.answer",
    "procengine.api.api_key",
    "procengine.api.anthropic_answer",
    "procengine.api.anthropic_request",
    "procengine.api.chat_answer",
    "procengine.api.chat_messages",
    "procengine.api.chat_request",
    "procengine.api.chat_stream",
    "procengine.api.choices",
    "procengine.api.completion_answer",
    "procengine.api.completion_request",
    "procengine.api.conversation",
    "procengine.api.errors",
    "procengine.api.event_log",
    "procengine.api.exchange",
    "procengine.api.generation_fields",
    "procengine.api.json_body",
    "procengine.api.logprobs",
    "procengine.api.prompts",
    "procengine.api.responses_answer",
    "procengine.api.responses_request",
    "procengine.api.usage",
    "procengine.bench.arrivals",
    "procengine.bench.datasets",
    "procengine.bench.goodput",
    "procengine.bench.peers.answers",
    "procengine.bench.peers.comparison",
    "procengine.bench.peers.loads",
    "procengine.bench.peers.results",
    "procengine.bench.peers.saved",
    "procengine.bench.peers.targets",
    "procengine.bench.plot_data",
    "procengine.bench.ratios",
    "procengine.bench.record",
    "procengine.bench.report",
    "procengine.bench.roofline",
    "procengine.bench.steady_decode",
    "procengine.bench.timelines",
    "procengine.bench.workload",
    "procengine.crash.kept",
    "procengine.crash.record",
    "procengine.frame_checks",
    "procengine.scheduler",
    "procengine.kv_cache",
    "procengine.input_builder",
    "procengine.adapter_table",
    "procengine.backlog",
    "procengine.completion_rate",
    "procengine.deadlines",
    "procengine.delta_cursor",
    "procengine.merged_delta",
    "procengine.submission",
    "procengine.stopping",
    "procengine.detokenizer",
    "procengine.stop_strings",
    "procengine.device_turns",
    "procengine.pipeline",
    "procengine.engine",
    "procengine.text_outputs",
    "procengine.choice",
    "procengine.request",
    "procengine.row_features",
    "procengine.slot_lists",
    "procengine.speculation",
    "procengine.embed_outputs",
    "procengine.output_table",
    "procengine.postprocessor",
    "procengine.profiling.bubbles",
    "procengine.profiling.capture",
    "procengine.profiling.chrome_trace",
    "procengine.profiling.report_data",
    "procengine.profiling.requests",
    "procengine.profiling.steps",
    "procengine.profiling.summary",
    "procengine.profiling.summary_text",
    "procengine.profiling.trace_writer",
    "procengine.step_payload",
    "procengine.step_stats",
    "procengine.tool_calls",
    "procengine.workflows",
    "procengine.restart_policy",
    "procengine.trace_context",
    "procengine.profiling.bubbles",
    "procengine.profiling.exposition",
    "procengine.profiling.group_frame",
    "procengine.profiling.group_totals",
    "procengine.profiling.histogram",
    "procengine.profiling.metric_families",
    "procengine.profiling.pass_totals",
    "procengine.profiling.process_watch",
    "procengine.profiling.request_ledger",
    "procengine.profiling.request_totals",
    "procengine.profiling.request_traces",
    "procengine.profiling.requests",
    "procengine.profiling.steps",
    "procengine.profiling.window",
)
IMPURE = (
    "asyncio",
    "datetime",
    "importlib",
    "multiprocessing",
    "os",
    "pathlib",
    "procengine.config",
    "procengine.ipc",
    "procengine.procs",
    "random",
    "secrets",
    "select",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "torch",
    "uvloop",
    "zmq",
)
# These names in these modules, and no other of the same module.
PURE_EXCEPT = {
    ("procengine.bench.datasets", "datetime.datetime"),  # reads dates in a text, not the clock
    ("procengine.workflows", "importlib"),
    ("procengine.workflows", "importlib.metadata"),  # the registry imports a part when somebody asks for it
    ("procengine.workflows.generate", "procengine.config.LimitsConfig"),
    ("procengine.workflows.prompt", "procengine.config.LimitsConfig"),  # a frozen value, named as a type
    ("procengine.workflows.row_sampling", "procengine.config.LimitsConfig"),
}

# What a client, the CLI, the frontend, the output process and a mock worker load: fast to start and free of torch.
TORCH_FREE = (
    "procengine.cli.bench_compare",
    "procengine.cli.bench_ipc",
    "procengine.cli.bench_load",
    "procengine.cli.bench_startup",
    "procengine",
    "procengine.client",
    "procengine.cli.main",
    "procengine.cli.profile",
    "procengine.cli.trace",
    "procengine.profiling.chrome_trace",
    "procengine.profiling.recording",
    "procengine.procs.frontend",
    "procengine.procs.output",
    "procengine.procs.worker",
    "procengine.procs.metrics",
    "procengine.procs.api",
    "procengine.cli.run_batch",
    "procengine.api.batch_run",
    "procengine.cli.top",
)


def is_below(module: str, parents: tuple[str, ...]) -> bool:
    """Whether `module` (or a name in a module) is one of `parents` or inside one."""
    return any(f"{module}.".startswith(f"{parent}.") for parent in parents)


@cache
def product_modules() -> dict[str, Path]:
    """Dotted name -> file, each file once: procs/ and kernels/ are read where they stand, not through the links."""
    modules = {}
    for folder, package in (
        ("procengine", "procengine"),
        ("procs", "procengine.procs"),
        ("kernels", "procengine.kernels"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if not (folder == "procengine" and parts[0] in ("procs", "kernels")):
                modules[".".join((package, *parts)).removesuffix(".__init__")] = path
    return modules


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(product_modules()[module].read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Dotted names that the file of `module` imports, with "from a import b" read as a.b."""
    return frozenset(_imports(tree_of(module)))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "relative import (ruff TID252 bans them)"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offenders(importers: Iterator[str], banned: tuple[str, ...]) -> list[str]:
    return [f"{module} imports {name}" for module in importers for name in imports_of(module) if is_below(name, banned)]


def test_product_modules_are_found() -> None:
    assert {"procengine.errors", "procengine.config", "procengine.kernels.backends"} <= set(product_modules())


@pytest.mark.parametrize("named", sorted({*MAY_IMPORT, *IMPORTED_BY, *TORCH_IN, *PURE, *TORCH_FREE}))
def test_tables_name_what_exists(named: str) -> None:
    assert any(is_below(module, (named,)) for module in product_modules())


@pytest.mark.parametrize("owner", MAY_IMPORT)
def test_module_imports_only_what_it_may(owner: str) -> None:
    found = [
        f"{module} imports {name}"
        for module in product_modules()
        if is_below(module, (owner,))
        for name in imports_of(module)
        if is_below(name, ("procengine",)) and not is_below(name, (owner, *MAY_IMPORT[owner]))
    ]
    assert found == []


@pytest.mark.parametrize("target", IMPORTED_BY)
def test_module_is_imported_only_by_those_above_it(target: str) -> None:
    importers = (module for module in product_modules() if not is_below(module, IMPORTED_BY[target]))
    assert offenders(importers, (target,)) == []


def test_torch_is_imported_on_the_device_side_only() -> None:
    importers = (module for module in product_modules() if not is_below(module, TORCH_IN))
    assert offenders(importers, ("torch",)) == []


def test_pure_middle_imports_nothing_impure() -> None:
    importers = (module for module in product_modules() if is_below(module, PURE))
    found = {(module, name) for module in importers for name in imports_of(module) if is_below(name, IMPURE)}
    assert found == PURE_EXCEPT  # also: an exception that is no longer made use of goes


def test_workflows_run_torch_in_their_forward_part_only() -> None:
    modules_by_part = {
        (workflow.name, part): path.partition(":")[0]
        for workflow in WORKFLOWS.values()
        for part, path in dataclasses.asdict(workflow).items()
        if part != "name" and path
    }
    assert set(modules_by_part.values()) <= set(product_modules())
    found = {key for key, module in modules_by_part.items() if is_below(module, TORCH_IN)}
    device_parts = {(w.name, part) for w in WORKFLOWS.values() for part in ("forward", "encode") if getattr(w, part)}
    assert found == device_parts


@pytest.mark.parametrize("module", TORCH_FREE)
def test_import_loads_neither_torch_nor_transformers(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}\nprint(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("module", product_modules())
def test_module_says_what_it_is(module: str) -> None:
    assert ast.get_docstring(tree_of(module)), f"{product_modules()[module].relative_to(ROOT)} has no module docstring"
