#!/usr/bin/env bash
# numpy 2.4.6: `Generator.standard_exponential(dtype=float32)` returns exactly 0 about once in 7
# million draws; in float64 it does not. A race for a token, argmax(p / E) or argmin(E / p), then
# draws a token whose probability is 0, because 0 / 0 is NaN, which argmax takes for the largest.
#
# Who meets it: samplers with top-k or top-p that draw all E of a vocabulary at once. With 16,384
# tokens it is every 440th draw in which some E is 0.
#
# Seen: "float32: 14 of 100000000 are 0, float64: 0; the race draws token 3, of probability 0"
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q numpy==2.4.6
"$place/venv/bin/python" -W ignore - <<'PYTHON'
import numpy as np

rng = np.random.default_rng(0)
zeros = sum(int((rng.standard_exponential(10**7, np.float32) == 0).sum()) for _ in range(10))
rng = np.random.default_rng(0)
double = sum(int((rng.standard_exponential(10**7) == 0).sum()) for _ in range(10))
p = np.array([0.5, 0.5, 0, 0, 0], np.float32)
drawn = int((p / np.array([1, 1, 1, 0, 1], np.float32)).argmax())
print(f"numpy {np.__version__}, float32: {zeros} of {10**8} are 0, float64: {double};", end=" ")
print(f"the race draws token {drawn}, of probability {p[drawn]:g}")
raise SystemExit(not (zeros and not double and p[drawn] == 0))
PYTHON
