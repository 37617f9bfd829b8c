#!/usr/bin/env bash
# pyarrow 26.0.1: ParquetFile.iter_batches over a whole file keeps the bytes of every row group that
# it has read until it is at its end, whatever batch_size, buffer_size and use_threads say. One call
# a row group frees them.
# Seen on Linux, 250 MiB of pictures in row groups of 25 MiB: 254 MiB held at the end of one
# iteration, 29 MiB with one iteration a row group.
# Who meets it: whoever streams pictures from large Parquet files with little memory.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyarrow==26.0.1
cat >"$folder/make.py" <<'PYTHON'
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq

schema = pa.schema({"image": pa.binary()})
with pq.ParquetWriter(sys.argv[1], schema, compression="none", use_dictionary=False) as file:
    for _ in range(10):
        file.write_table(pa.table({"image": [os.urandom(2**19) for _ in range(50)]}))
PYTHON
cat >"$folder/read.py" <<'PYTHON'
import sys

import pyarrow as pa
import pyarrow.parquet as pq

path, way = sys.argv[1:]
file = pq.ParquetFile(path, buffer_size=2**20)
groups = [None] if way == "whole" else [[group] for group in range(file.num_row_groups)]
most = 0
for group in groups:
    for batch in file.iter_batches(8, row_groups=group):
        most = max(most, pa.total_allocated_bytes())
print(most // 2**20)
PYTHON
"$folder/venv/bin/python" "$folder/make.py" "$folder/a.parquet"
whole=$("$folder/venv/bin/python" "$folder/read.py" "$folder/a.parquet" whole)
each=$("$folder/venv/bin/python" "$folder/read.py" "$folder/a.parquet" each)
echo "pyarrow 26.0.1: $whole MiB held by one iteration, $each MiB by one a row group"
[ "$whole" -gt $((3 * each)) ]
