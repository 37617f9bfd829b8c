#!/usr/bin/env bash
# Hydra chooses sweeper and launcher before it composes the jobs of a sweep. A choice that is swept
# over (`-m preset=a,b`) and overrides one of them is composed into its jobs, and has no effect.
# Nothing is said, and the exit status is 0.
# Seen: every job's configuration names the launcher `other`; the basic launcher runs all of them.
# Given alone (`-m preset=b`), the same choice refuses to run, because its launcher does not exist.
# Met by: presets that bring a sweeper, a launcher or callbacks, as soon as two are swept over.
# Versions: hydra-core 1.3.8, omegaconf 2.3.1.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv venv
venv/bin/pip install -q hydra-core==1.3.8 omegaconf==2.3.1
mkdir -p conf/preset conf/hydra/launcher
printf 'defaults: [{preset: null}]\n' > conf/config.yaml
printf '# @package _global_\nx: 1\n' > conf/preset/a.yaml
printf '# @package _global_\ndefaults: [{override /hydra/launcher: other}]\nx: 2\n' > conf/preset/b.yaml
printf '_target_: nowhere.Launcher\n' > conf/hydra/launcher/other.yaml
cat > app.py <<'APP'
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    print(f"ran: x={cfg.x} with launcher {HydraConfig.get().launcher._target_}")

main()
APP
venv/bin/python -c "import hydra; print('hydra-core', hydra.__version__)"
swept=$(venv/bin/python app.py -m preset=a,b 2>&1)
echo "$swept"
if alone=$(venv/bin/python app.py -m preset=b 2>&1); then echo "changed: preset=b alone runs"; exit 1; fi
echo "$alone" | tail -1
if ! grep -q "ran: x=2 with launcher nowhere.Launcher" <<< "$swept"; then
  echo "changed: a swept launcher is not ignored any more"
  exit 1
fi
echo "as described: the job ran, although its launcher does not exist"
