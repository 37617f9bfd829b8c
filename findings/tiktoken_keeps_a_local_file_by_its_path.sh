#!/usr/bin/env bash
# tiktoken 0.14.0: `tiktoken.load.load_tiktoken_bpe` keeps what it read in a cache that goes by the
# path, of local files too. After the file has been replaced, it returns the ranks of the former one,
# in later processes as well. With the file's hash, or TIKTOKEN_CACHE_DIR set to nothing, it reads.
# Seen: "before: 3 tokens, after: 3 tokens, with its hash: 2 tokens".
# Who meets it: whoever updates the text tokenizer of Emu3, Emu3.5 or a Qwen model in its place, also
# through transformers' TikTokenConverter, which calls the same function.
# Exits 1 if that changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check tiktoken==0.14.0
unset TIKTOKEN_CACHE_DIR DATA_GYM_CACHE_DIR
cd "$place"
export TMPDIR=$place  # where the cache is
cat >read.py <<'PY'
import base64
import hashlib
import pathlib
import sys

from tiktoken.load import load_tiktoken_bpe

file = pathlib.Path("words.tiktoken").resolve()
words = sys.argv[2:]
file.write_text("".join(f"{base64.b64encode(w.encode()).decode()} {n}\n" for n, w in enumerate(words)))
digest = hashlib.sha256(file.read_bytes()).hexdigest() if sys.argv[1] == "hash" else None
print(len(load_tiktoken_bpe(str(file), digest)), "tokens")
PY
before=$("$place/venv/bin/python" read.py plain a b ab)
after=$("$place/venv/bin/python" read.py plain a b)
hashed=$("$place/venv/bin/python" read.py hash a b)
echo "before: $before, after: $after, with its hash: $hashed"
[ "$before, $after, $hashed" = "3 tokens, 3 tokens, 2 tokens" ]
