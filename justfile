# https://just.systems: `just` lists the recipes.

_default:
    @just --list

# tempera with everything that development needs, at the tested versions
setup:
    pip install -c constraints.txt -e ".[dev,docs]"
    pre-commit install

# lint, format and types
check:
    ruff check
    ruff format --check
    mypy

# the fast suite
test *arguments:
    pytest {{arguments}}

# every test: full laws, commands of the docs, the wheel
test-all *arguments:
    pytest -m "" {{arguments}}

# statements of each package, for people to look at
weight:
    #!/usr/bin/env python3
    import ast, collections, pathlib
    counts = collections.Counter()
    for top in ("src", "eval", "train_draft", "examples", "docs", "tests"):
        for file in pathlib.Path(top).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            count = sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
            counts[top] += count
            if top == "src":
                counts["/".join(file.parts[:-1][:3])] += count
    for name, count in sorted(counts.items()):
        print(f"{count:7,}  {name}")

# mutation testing, for example `just mutation "tempera.rules.standard*"`
mutation *arguments:
    mutmut run {{arguments}}

# the documentation, as CI builds it
docs:
    mkdocs build --strict
