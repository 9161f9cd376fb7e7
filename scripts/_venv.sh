# shellcheck shell=bash
# Sourced by the other scripts: goes to the repository root and makes .venv ready.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
#   venv_ready run        # the package and what it needs
#   venv_ready dev        # tests and lint as well
#   "$venv/bin/python" ...
#
# PYTHON           the interpreter to build .venv with (default: the first of python3.13 .. python3 that will do)
# TORCH_INDEX_URL  where to install torch from, e.g. an index of CPU builds (default: as pip is set up)

set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
root=$PWD
venv=$root/.venv
export PIP_DISABLE_PIP_VERSION_CHECK=1

# The release the tests run with. It is pinned for machines without an NVIDIA driver: unpinned, pip takes the newest
# release, whose default Linux build brings gigabytes of CUDA libraries, even where an index offers a CPU build of
# this one.
torch_release=2.13.0

say() { printf '\n\033[1m== %s\033[0m\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Whether $1 runs, is 3.11 to 3.13 and can make a venv. Only running it tells: version managers leave shims on the
# path that fail, and Debian's python3 comes without venv.
python_will_do() {
  "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

minor_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

find_python() {
  if [[ -n ${PYTHON:-} ]]; then
    python_will_do "$PYTHON" || die "PYTHON=$PYTHON does not run, is not 3.11 to 3.13, or lacks the venv module"
    printf '%s\n' "$PYTHON"
    return
  fi
  local name
  for name in python3.13 python3.12 python3.11 python3 python; do
    if python_will_do "$name"; then
      printf '%s\n' "$name"
      return
    fi
  done
  die "no Python 3.11 to 3.13 with the venv module found; install one (on Debian also python3-venv) or set PYTHON"
}

make_venv() {
  if python_will_do "$venv/bin/python"; then
    [[ -z ${PYTHON:-} ]] && return
    python_will_do "$PYTHON" && [[ $(minor_version "$PYTHON") == $(minor_version "$venv/bin/python") ]] && return
  fi
  local python
  python=$(find_python)
  say "making .venv with $python ($(minor_version "$python"))"
  "$python" -m venv --clear "$venv"
}

# What an install depends on: when none of it changed, there is nothing to do.
stamp_now() {
  "$venv/bin/python" - "$root" <<'PY'
import hashlib, pathlib, sys
seen = hashlib.sha256(repr((sys.version, sys.argv[1])).encode())
for name in ("pyproject.toml", "scripts/_venv.sh"):
    seen.update(pathlib.Path(name).read_bytes())
print(seen.hexdigest())
PY
}

pip_install() {
  local quiet=--quiet
  [[ -t 1 ]] && quiet=
  # shellcheck disable=SC2086
  "$venv/bin/python" -m pip install $quiet "$@"
}

nvidia_driver() { [[ -e /proc/driver/nvidia/version ]] || nvidia-smi -L >/dev/null 2>&1; }

install_torch() {
  "$venv/bin/python" -c 'import torch' >/dev/null 2>&1 && return
  if nvidia_driver; then
    say "installing torch (NVIDIA driver found)"
    pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
  else
    say "installing torch $torch_release (no NVIDIA driver found)"
    pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$torch_release" ||
      die "torch $torch_release could not be installed; set TORCH_INDEX_URL, or install torch into .venv yourself"
  fi
}

# An editable install compiled the kernels of the sources it saw; these may be newer. Quick where nothing changed.
native_ready() {
  "$venv/bin/python" -m procengine.kernels.native.build >/dev/null ||
    say "the native CPU kernels could not be built: CPU inference will be slow, and their tests are skipped"
}

# venv_ready run|dev
venv_ready() {
  install_ready "$1"
  native_ready
}

install_ready() {
  make_venv
  local now
  now=$(stamp_now)
  [[ -f $venv/.stamp-$1 && $(<"$venv/.stamp-$1") == "$now" ]] && return
  install_torch
  if [[ $1 == dev ]]; then
    say "installing procengine with what its tests need"
    pip_install -e '.[dev]'
    printf '%s\n' "$now" >"$venv/.stamp-dev"
  else
    say "installing procengine"
    pip_install -e .
  fi
  printf '%s\n' "$now" >"$venv/.stamp-run"
}
