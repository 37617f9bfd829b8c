#!/usr/bin/env bash
# pyarrow 26.0.1: ParquetFile.iter_batches, read and read_row_group leave a column that the file
# does not have out without a word; pyarrow.parquet.read_table raises ArrowInvalid for the same name.
# Seen: columns=["image", "captoin"] gives batches of one column, image.
# Who meets it: readers of training pictures that take the caption by a configured name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyarrow==26.0.1
cat >"$folder/read.py" <<'PYTHON'
import sys

import pyarrow as pa
import pyarrow.parquet as pq

path = f"{sys.argv[1]}/a.parquet"
names = ["image", "captoin"]
pq.write_table(pa.table({"image": [b"x"], "caption": ["a ring"]}), path)
batch = next(pq.ParquetFile(path).iter_batches(columns=names))
read = pq.ParquetFile(path).read(columns=names)
try:
    pq.read_table(path, columns=names)
    told = None
except pa.ArrowInvalid as problem:
    told = str(problem).splitlines()[0]
print("pyarrow", pa.__version__, batch.schema.names, read.column_names, "| read_table:", told)
sys.exit(batch.schema.names != ["image"] or read.column_names != ["image"] or told is None)
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder"
