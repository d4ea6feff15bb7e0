#!/usr/bin/env bash
# Make .venv from requirements.lock by plain pip. Idempotent: a second call returns at once. Called by `make install`.
#   PYTHON       the interpreter to use; empty looks for a suitable one
#   TORCH_INDEX  another package index for torch alone, as the install page of pytorch.org names it; empty takes pip's own
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME

stop() {
  echo "make install: $1" >&2
  exit 1
}

[ "$(uname -s)" = Linux ] || stop "surefoot runs on Linux and this is $(uname -s): use a Linux machine, a container or WSL 2"

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
python=""
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
  if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  found=$(${PYTHON:-python3} --version 2>/dev/null || echo "no Python")
  stop "Python 3.11 or newer is needed and there is $found: install one (Debian, Ubuntu: apt-get install python3.12 python3.12-venv), or name it with PYTHON=/path/to/python3"
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  stop "$python lacks venv or ensurepip: install them (Debian, Ubuntu: apt-get install python3-venv), then run make install again"

# What stands in the stamp of a finished install: folder, fingerprint, index. An empty TORCH_INDEX accepts the torch that is there.
stamp=.venv/.installed
fingerprint=$(cat requirements.lock pyproject.toml scripts/install.sh | sha256sum | cut -d' ' -f1)
old_folder="" old_fingerprint="" old_index=""
if [ -f "$stamp" ]; then
  { read -r old_folder && read -r old_fingerprint && read -r old_index; } <"$stamp" || true
fi
index=${TORCH_INDEX:-$old_index}
if [ "$old_folder" = "$PWD" ] && [ "$old_fingerprint" = "$fingerprint" ] && [ "$index" = "$old_index" ]; then
  exit 0
fi

torch=$(grep '^torch==' requirements.lock)
rest=$(mktemp)
trap 'rm -f "$rest"' EXIT
grep -v -e '^torch==' -e '^#' requirements.lock >"$rest"
cat <<SAY
make install: .venv with $("$python" --version), from requirements.lock
  downloads, unless pip has them cached:
    $(wc -l <"$rest") packages, about 0.2 GB in all
    ${torch/==/ }: from ${index:-pip as it is set up here}
      about 0.2 GB as a CPU build; about 3 GB with the CUDA libraries that the usual Linux build brings along
  needs 1.5 GB of disk for a CPU build, 8 GB for a CUDA build
  another build of torch: make install TORCH_INDEX=https://download.pytorch.org/whl/cpu (or .../cu130 and so on, see pytorch.org)
SAY

rm -f "$stamp"
if [ "${old_folder:-$PWD}" != "$PWD" ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  "$python" -m venv --clear .venv # absent, half made, or moved here from another folder
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
pip install --requirement "$rest"
if [ -n "$index" ]; then
  [ "$index" = "$old_index" ] || pip install --index-url "$index" --force-reinstall --no-deps "$torch" # never keep another build
  pip install --index-url "$index" "$torch"
else
  pip install "$torch"
fi
pip install --no-deps --no-build-isolation --editable .
printf '%s\n' "$PWD" "$fingerprint" "$index" >"$stamp"
echo "make install: done. Next: make train"
