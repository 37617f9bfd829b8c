#!/usr/bin/env bash
# wandb: a second wandb.init returns the first run while that is open, and ignores its own id, dir,
# name and config. A run is closed at the end of the process, so a job that fails in a sweep of one
# process leaves it open.
#
# Seen with wandb 0.31.0: "second is first: True", "id of the second: first - job in its config:
# first": what the second job logs goes into the first job's run. With `silent` nothing is printed.
#
# Who meets it: whoever logs several jobs from one process, such as Hydra's -m with the basic
# launcher, a notebook, or pytest. `reinit="create_new"`, or `with wandb.init(...)`, keeps runs apart.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "wandb==0.31.0"
cd "$place"
mkdir first second third
WANDB_MODE=offline WANDB_SILENT=true "$place/venv/bin/python" - <<'PYTHON'
import wandb

print("wandb", wandb.__version__)


def start(name, **options):
    settings = wandb.Settings(silent=True, console="off")
    own = {"id": name, "name": name, "dir": name, "config": {"job": name}}
    return wandb.init(project="p", settings=settings, **own, **options)


first = start("first")  # its job fails: nobody calls finish
second = start("second")
second.log({"loss": 2.0})
third = start("third", reinit="create_new")
print("second is first:", second is first)
print("id of the second:", second.id, "- job in its config:", second.config["job"])
print("id of the third, with create_new:", third.id)
same = second is first and second.id == "first" and third.id == "third"
print("as before" if same else "the behaviour has changed")
third.finish()
first.finish()
raise SystemExit(0 if same else 1)
PYTHON
