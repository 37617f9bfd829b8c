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

# mutation testing, for example `just mutation "tempera.rules.standard*"`
mutation *arguments:
    mutmut run {{arguments}}

# the documentation, as CI builds it
docs:
    mkdocs build --strict
