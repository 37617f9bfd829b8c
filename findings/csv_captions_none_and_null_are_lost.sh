#!/usr/bin/env bash
# datasets 5.2.0 reads CSV through pandas, which takes None, NA, null, nan and n/a for missing
# values: captions of these words become None. Quoting them does not help.
# Seen: ['a ring', None, None, None, None, 'none']
# Who meets it: data sets of short labels or of words, in a .csv or in the metadata.csv of a folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pandas==3.1.1
cat >"$folder/read.py" <<'PYTHON'
import pathlib
import sys

import datasets

file = pathlib.Path(sys.argv[1], "a.csv")
file.write_text('number,text\n0,a ring\n1,None\n2,"NA"\n3,null\n4,"n/a"\n5,none\n')
rows = datasets.load_dataset("csv", data_files=str(file), split="train", streaming=True)
texts = [row["text"] for row in rows]
print("datasets", datasets.__version__, texts)
sys.exit(texts != ["a ring", None, None, None, None, "none"])
PYTHON
HF_HOME="$folder/cache" "$folder/venv/bin/python" "$folder/read.py" "$folder"
