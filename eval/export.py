"""Lay pictures out as a benchmark's scorer expects them; the options are in conf/export.yaml."""

from tempera.commands.scripts import export as main

if __name__ == "__main__":
    main()
