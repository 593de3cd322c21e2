#!/usr/bin/env bash
# Prepares a Python environment that can start a ComfyUI checkout:
#   setup.sh CHECKOUT VENV           what the checkout asks for, and torch (TORCH, TORCHVISION, TORCHAUDIO choose the builds)
#   setup.sh CHECKOUT VENV SHARED    the same packages as the environment SHARED, except where the checkout pins others
# Then: HALO_VAE_COMFYUI="CHECKOUT=VENV/bin/python" pytest --with comfyui     (several pairs: separated by spaces)
set -euo pipefail
if [ $# -lt 2 ]; then sed -n '2,5p' "$0"; exit 2; fi
checkout=$1 venv=$2 shared=${3:-}
python=${PYTHON:-python3}
[ -f "$checkout/main.py" ] || { echo "$checkout is no ComfyUI checkout: it has no main.py" >&2; exit 2; }

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
# torch is installed apart: the build belongs to the device, not to the checkout
grep -viE '^(torch|torchvision|torchaudio)([^a-z]|$)' "$checkout/requirements.txt" > "$wanted"

if [ -n "$shared" ]; then
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    "$shared/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$site/shared.pth"
    # Exact pins only: what is merely bounded is there already.
    grep -E '==' "$wanted" | while read -r line; do pip --no-deps "$line"; done
else
    pip "${TORCH:-torch}" "${TORCHVISION:-torchvision}" "${TORCHAUDIO:-torchaudio}"
    pip -r "$wanted"
fi
"$venv/bin/python" -c 'import torch, torchvision, aiohttp, safetensors; print("ready: torch", torch.__version__)'
