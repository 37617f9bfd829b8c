#!/usr/bin/env bash
# datasets 5.2.0: a folder with several metadata files is read in another order in every process,
# since their names are kept in a set and Python salts the hashes of text. Nothing is said.
# Seen: PYTHONHASHSEED=0, 1 and 2 give three orders of six folders.
# Who meets it: whoever streams such a folder in several processes that each take every n-th row,
# or goes on after a restart with .skip(n): rows come twice, others never.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pillow==13.0.0
cat >"$folder/make.py" <<'PYTHON'
import pathlib
import sys

from PIL import Image

for number in range(6):
    place = pathlib.Path(sys.argv[1], str(number))
    place.mkdir(parents=True)
    Image.new("RGB", (8, 8), (number, 0, 0)).save(place / "a.png")
    (place / "metadata.csv").write_text(f"file_name,text\na.png,caption {number}\n")
PYTHON
cat >"$folder/read.py" <<'PYTHON'
import sys

import datasets

rows = datasets.load_dataset(sys.argv[1], split="train", streaming=True)
print([row["text"][-1] for row in rows.remove_columns("image")])
PYTHON
export HF_HOME="$folder/cache" HF_HUB_OFFLINE=1  # all of it is here
"$folder/venv/bin/python" "$folder/make.py" "$folder/pictures"
"$folder/venv/bin/pip" list 2>/dev/null | grep -E "^datasets "
for seed in 0 1 2; do
  PYTHONHASHSEED=$seed "$folder/venv/bin/python" "$folder/read.py" "$folder/pictures" 2>/dev/null
done | tee "$folder/orders"
orders=$(sort -u "$folder/orders" | wc -l)
echo "$orders orders"
[ "$orders" -gt 1 ]
