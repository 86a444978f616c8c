#!/usr/bin/env bash
# Builds the kernels for the GPU of this machine and checks all that only a GPU can show; prints one table.
# Takes under 8 minutes. PYTHON names the interpreter whose torch is used (default: python).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check: no CUDA device is visible to $PYTHON; nothing was checked" >&2
  exit 2
fi
TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$("$PYTHON" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')}
export TORCH_CUDA_ARCH_LIST
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! MEGATRON_PROBES_CUDA=1 timeout 240 "$PYTHON" setup.py -q build_ext --inplace >"$log" 2>&1; then
  tail -40 "$log" >&2
  echo "gpu_check: the build failed" >&2
  exit 1
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec timeout 230 "$PYTHON" scripts/gpu_check.py "$@"
