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

# plant faults into a copy of the sources, one at a time, and say which test sees each
mutants *arguments:
    python tests/support/mutants.py {{arguments}}

# mutation testing: `just mutation --sample 100 --seed 1` takes 100 places, without options all
mutation *arguments:
    python tests/support/mutation.py {{arguments}}

# give the scripts hostile options and damaged files: a sample, or --all as every night
hostile *arguments:
    python tests/support/hostile.py {{arguments}}

# the documentation, as CI builds it
docs:
    mkdocs build --strict
