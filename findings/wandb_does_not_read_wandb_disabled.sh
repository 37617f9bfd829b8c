#!/usr/bin/env bash
# WANDB_DISABLED=true, which transformers' Trainer obeys and which W&B's pages named for years, is
# not read by wandb itself: a run is started, and written to disk or sent. WANDB_MODE=disabled works.
# Seen: with WANDB_DISABLED=true and WANDB_MODE=offline a run file is written; with
# WANDB_MODE=disabled none.
# Met by: users who disable W&B for all of their programs, and meet one that calls wandb.init.
# Versions: wandb 0.31.0.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv venv
venv/bin/pip install -q wandb==0.31.0
cat > show.py <<'APP'
import pathlib
import sys
import wandb

place = pathlib.Path(sys.argv[1])
place.mkdir()
run = wandb.init(project="p", dir=str(place))
run.log({"x": 1})
run.finish()
print(sys.argv[1], len(list(place.glob("wandb/*run-*/*.wandb"))))
APP
export HOME=$place WANDB_SILENT=true
venv/bin/python -c "import wandb; print('wandb', wandb.__version__)"
variable=$(WANDB_DISABLED=true WANDB_MODE=offline venv/bin/python show.py variable)
mode=$(WANDB_MODE=disabled venv/bin/python show.py mode)
echo "run files: $variable, $mode"
if [ "$variable" != "variable 1" ] || [ "$mode" != "mode 0" ]; then echo "changed"; exit 1; fi
echo "as described"
