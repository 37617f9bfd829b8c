#!/usr/bin/env bash
# A job of a Hydra sweep that calls sys.exit ends the whole sweep: with the basic launcher the jobs
# after it never run, and the exit status of the sweep is the job's, 0 for sys.exit(0) and for
# programs whose main ends with sys.exit(main()).
# Seen: of x=0,1,2 one job ran, and the exit status is 0; nothing names the others.
# Met by: programs that end by sys.exit, which tests of a single run do not show.
# Versions: hydra-core 1.3.8, omegaconf 2.3.1.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv venv
venv/bin/pip install -q hydra-core==1.3.8 omegaconf==2.3.1
cat > app.py <<'APP'
import sys

import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    print(f"ran: x={cfg.x}", flush=True)
    sys.exit(0)

main()
APP
venv/bin/python -c "import hydra; print('hydra-core', hydra.__version__)"
status=0
seen=$(venv/bin/python app.py -m +x=0,1,2 2>&1) || status=$?
echo "$seen"
echo "exit status $status"
if [ "$(grep -c '^ran' <<< "$seen")" != 1 ] || [ "$status" != 0 ]; then echo "changed"; exit 1; fi
echo "as described"
