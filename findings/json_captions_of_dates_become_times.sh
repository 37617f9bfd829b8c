#!/usr/bin/env bash
# datasets 5.2.0 reads JSON lines through pyarrow, which turns a column whose texts all look like
# dates into times: the caption "2024-05-01" comes as datetime(2024, 5, 1, 0, 0). One caption that
# is no date keeps the whole column as text.
# Who meets it: captions or class names that are dates, and code that asks isinstance(text, str).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1
cat >"$folder/read.py" <<'PYTHON'
import pathlib
import sys

import datasets


def read(*texts):
    file = pathlib.Path(sys.argv[1], f"{len(texts)}.jsonl")
    file.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    rows = datasets.load_dataset("json", data_files=str(file), split="train", streaming=True)
    return [row["text"] for row in rows]


dates, mixed = read("2024-05-01", "2024-05-02"), read("2024-05-01", "2024-05-02", "a ring")
print("datasets", datasets.__version__, dates, mixed)
sys.exit(isinstance(dates[0], str) or not isinstance(mixed[0], str))
PYTHON
HF_HOME="$folder/cache" "$folder/venv/bin/python" "$folder/read.py" "$folder"
