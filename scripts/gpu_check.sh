#!/usr/bin/env bash
# Checks the decoder on a machine with a CUDA device: exactness of the text, then what each width costs.
#
#     bash scripts/gpu_check.sh [FOLDER]
#
# FOLDER (default: build/gpu_check) receives the virtual environment, both logs and the machine's description. Needs
# python3 (3.11 or newer) with pip and an NVIDIA driver for CUDA 13; set EXTRA=cuda12 for an older driver.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:-build/gpu_check}"
mkdir -p "$folder"
python="$folder/venv/bin/python"

nvidia-smi | tee "$folder/machine.txt"
python3 -m venv "$folder/venv"
if [[ "${EXTRA:-cuda}" == cuda ]]; then
    "$python" -m pip install --quiet -e ".[test,cuda]"
else
    "$python" -m pip install --quiet -e ".[test]" "jax[$EXTRA]"
fi
"$python" -m pip list >>"$folder/machine.txt"

# Without a GPU jax would fall back to the CPU and the checks would say nothing.
"$python" -c 'import jax; device = jax.devices()[0]; print(device.device_kind); assert device.platform == "gpu", device'

status=0
"$python" -m pytest tests/test_decode_exactness.py tests/test_compiled.py 2>&1 | tee "$folder/exactness.log" || status=$?
"$python" scripts/bench.py --costs 2>&1 | tee "$folder/costs.log" || status=$?
echo "exit code $status; logs in $folder"
exit "$status"
